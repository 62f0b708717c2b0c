"""What a run is told, and what it leaves on disk and on the screen."""
