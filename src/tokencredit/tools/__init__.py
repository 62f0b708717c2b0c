"""Commands around training; only `commands/` imports them."""
