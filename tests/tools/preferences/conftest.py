"""Files of pairs, some of them hostile."""

import json

import pytest

HOSTILE = """</script><img src=x onerror="document.title='owned'"><b>bold</b> {{ 7 * 7 }}
second line & \x1b[2J\u202egnp \u2028 'q'"""


@pytest.fixture
def pairs_file(tmp_path):
    """Three pairs: plain, hostile, and a conversation."""
    question = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Good?"}]
    rows = [
        {"prompt": "The film was", "chosen": " good", "rejected": " bad"},
        {"prompt": HOSTILE, "chosen": HOSTILE + "1", "rejected": HOSTILE + "2"},
        {
            "prompt": question,
            "chosen": [{"role": "assistant", "content": "Yes."}],
            "rejected": [{"role": "assistant", "content": "No."}],
        },
    ]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
