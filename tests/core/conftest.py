import os

from hypothesis import settings

# Examples are the same in every run, so that a test that passed here passes there.
EXAMPLES = int(os.environ.get("TOKENCREDIT_EXAMPLES", "300"))
settings.register_profile("same", derandomize=True, deadline=None, database=None, max_examples=EXAMPLES)
settings.load_profile("same")
