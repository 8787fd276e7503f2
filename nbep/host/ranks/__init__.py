"""The ranks as a group: communicators, waiting for each other, and what all of them must do alike."""
