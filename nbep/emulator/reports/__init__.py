"""What a stopped run says: errors, faults, races, deadlocks, and the lines of code they name."""
