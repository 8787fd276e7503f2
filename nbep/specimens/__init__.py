"""What the lab knows of expert parallelism: scenarios to check, workloads to run, views of traces."""
