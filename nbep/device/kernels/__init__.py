"""One kernel a file. The file name is the kernel's name; the folder is its transport. `parts` holds shared steps."""
