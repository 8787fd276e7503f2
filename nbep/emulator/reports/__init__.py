"""What a stopped run says: the words for faults, races, deadlocks and other facts."""
