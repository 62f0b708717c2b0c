"""Two processes that sum tensors, as threads in step."""

from threading import Barrier, Thread


def in_two(run):
    """Call `run(rank, reduce)` for the ranks 0 and 1 at once; `reduce` gives both the sum of what they pass."""
    barrier, parts, failed = Barrier(2, timeout=60), [None, None], []

    def process(rank):
        def reduce(x):
            parts[rank] = x
            barrier.wait()
            total = parts[0] + parts[1]
            barrier.wait()
            return total

        try:
            run(rank, reduce)
        except BaseException as error:
            failed.append(error)
            barrier.abort()

    threads = [Thread(target=process, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
