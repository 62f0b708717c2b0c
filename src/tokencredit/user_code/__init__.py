"""User code: loading it, calling it within timeouts, and describing its errors."""
