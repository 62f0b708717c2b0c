"""Chat templates: prompts, turns and observations as token ids, and tool calls in sampled turns."""
