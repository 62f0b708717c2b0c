"""Small real models, made once: random weights, one of each architecture, with the built-in tokenizer."""

import gc
import importlib.util
import json
import os
import shlex
import signal
import sys

# Tests run side by side, and their models are small: two threads each would mostly wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Else importing torch._inductor starts processes that compile, of ten seconds each.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# As the command does, which is imported late in a process without workers.
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

# A shell starts what runs in its background without Ctrl-C, and so would be the processes that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from pathlib import Path
from shutil import which

import pytest
from hypothesis import settings

pytest.register_assert_rewrite("helpers")

from helpers.models import SHAPE, random_lm
from helpers.proofs import proofs
from helpers.slow import is_slow

GATED = SHAPE | {"intermediate_size": 48, "num_key_value_heads": 2}
ARCHITECTURES = {
    "gpt2": SHAPE,  # learned positions, tied embeddings
    "llama": GATED | {"tie_word_embeddings": False},  # rotary positions, grouped queries
    "qwen3": GATED | {"head_dim": 8, "tie_word_embeddings": True},
    "gemma": GATED | {"head_dim": 16},  # scaled embeddings
    "gpt_neox": SHAPE | {"intermediate_size": 48},  # rotary positions on a part, parallel residual
}

# Examples are the same in every run, so that a test that passed here passes there; those of `make fuzz` are fresh.
settings.register_profile("fixed", derandomize=True, database=None, deadline=None, max_examples=60)
settings.register_profile("few", settings.get_profile("fixed"), max_examples=15)
settings.register_profile("fresh", derandomize=False, deadline=None, max_examples=3000, print_blob=True)
settings.load_profile("fixed")


def pytest_collection_modifyitems(items):
    """Mark the tests that `is_slow` names as slow, and skip those marked `gpu` where there is no CUDA device."""
    for item in items:
        if is_slow(item):
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("gpu") and not cuda():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(optionalhook=True)  # vLLM's environment has no xdist.
def pytest_xdist_setupnodes(config, specs):
    """Workers are forks of one process that has imported the libraries: each would need 10 seconds of a core for it."""
    from helpers import warm

    config.add_cleanup(warm.Listening().close)
    for spec in specs:
        spec.python = shlex.join([sys.executable, warm.__file__])


def pytest_collection_finish():
    """Spare what is imported from garbage collections, which would look at a million objects that stay."""
    gc.freeze()


def cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_generate_tests(metafunc):
    """A test that takes `architecture` runs on each of them, daily on absolute and on rotary positions."""
    if "architecture" in metafunc.fixturenames:
        daily = ("gpt2", "llama")
        metafunc.parametrize("architecture", [*daily, *proofs(*(x for x in ARCHITECTURES if x not in daily))])


@pytest.fixture(scope="session")
def counts():
    """The class of contexts that count kernels and host syncs."""
    path = Path(__file__).parents[1] / "benchmarks" / "counting.py"
    spec = importlib.util.spec_from_file_location("counting", path)
    counting = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(counting)
    return counting.Counts


# Torch and Transformers are imported where they are needed, because the process that hands tests to the workers of
# pytest-xdist loads this file too.


@pytest.fixture(scope="session")
def tokenizer():
    from transformers import AutoTokenizer

    from tokencredit.text.models.model_loading import resolve

    return AutoTokenizer.from_pretrained(resolve("builtin:reviews", "policy"))


SENTENCES = [
    "The sky is blue. The sky is not green.",
    "I was singing in the rain, and it was good!",
    "A café in Seoul: 한국어, and 😀 too.",
] * 20


@pytest.fixture(scope="session")
def tokenizers():
    """Real tokenizers of each kind by name, trained on a few sentences.

    In `sentencepiece`, as in Llama's, unknown characters are bytes and the first space is dropped.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    ends = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    special = list(ends.values())

    llama = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    llama.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    llama.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    llama.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
    llama.train_from_iterator(
        SENTENCES[:2] * 9, trainers.BpeTrainer(vocab_size=300, special_tokens=[*special, *alphabet])
    )
    written = json.loads(llama.to_str())
    written["added_tokens"] = [token for token in written["added_tokens"] if token["content"] in special]
    llama = Tokenizer.from_str(json.dumps(written))

    unigram = Tokenizer(models.Unigram())
    unigram.pre_tokenizer, unigram.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    unigram.train_from_iterator(
        SENTENCES, trainers.UnigramTrainer(vocab_size=200, special_tokens=special, unk_token="<unk>")
    )

    wordpiece = Tokenizer(models.WordPiece(unk_token="<unk>"))
    wordpiece.pre_tokenizer, wordpiece.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    wordpiece.train_from_iterator(SENTENCES, trainers.WordPieceTrainer(vocab_size=90, special_tokens=special))

    bytes_ = Tokenizer(models.BPE())
    bytes_.pre_tokenizer, bytes_.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    bytes_.train_from_iterator(SENTENCES, trainer)

    made = {"sentencepiece": llama, "unigram": unigram, "wordpiece": wordpiece, "bytes": bytes_}
    return {name: PreTrainedTokenizerFast(tokenizer_object=one, **ends) for name, one in made.items()}


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory, tokenizer) -> dict[str, Path]:
    """Folders as people have them on disk, by architecture."""
    folders = {}
    for name, shape in ARCHITECTURES.items():
        folders[name] = tmp_path_factory.mktemp(name)
        random_lm(name, tokenizer, **shape).save_pretrained(folders[name])
        tokenizer.save_pretrained(folders[name])
    return folders


@pytest.fixture(scope="session")  # set up before `run_folder`, so that nothing trains for a browser that is missing
def browser():
    """Debian's chromium, without a screen; without it, CI fails and other machines skip."""
    from selenium import webdriver
    from selenium.webdriver.support.ui import WebDriverWait

    if not (which("chromium") and which("chromedriver")):
        missing = "no chromium or no chromedriver on the PATH; on Debian: apt-get install chromium chromium-driver"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(missing)
    options = webdriver.ChromeOptions()
    options.binary_location = which("chromium")
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})

    class Chrome(webdriver.Chrome):
        reading = None
        """Address of the page that `read` opened and no `get` has left."""

        def get(self, url):
            """Open a page and wait for it: chromedriver 150 may return before a second local page is there."""
            self.reading = None
            self.execute_script("window.left = true")  # so that the same page, opened again, is not taken for it
            super().get(url)
            there = "!window.left && location.href === new URL(arguments[0]).href && document.readyState === 'complete'"
            WebDriverWait(self, 60, 0.05).until(lambda found: found.execute_script(f"return {there}", url))

        def read(self, url):
            """Open a page, unless the test before read it too; a test that reads leaves others what they read."""
            if self.reading != url:
                self.get(url)
                self.reading = url

    driver = Chrome(options, webdriver.ChromeService(which("chromedriver")))
    yield driver
    driver.quit()
