"""Processes of one run: their device, sums, heartbeats, shards and signals."""
