"""What a run leaves on disk and on the screen, and how it goes on."""
