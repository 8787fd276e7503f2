"""A program for docs/examples/run.py, with a child process that multiprocessing spawns and one of its own."""

import multiprocessing
import subprocess
import sys

OTHER = "import deep_ep.buffer, deep_ep, deep_ep_cpp; print(deep_ep.buffer.Buffer is deep_ep.Buffer, deep_ep.__name__)"


def names(queue):
    import deep_ep
    import deep_ep._C as compiled  # noqa: N811
    import deep_ep_cpp
    from deep_ep.buffer import Buffer
    from deep_ep.buffers.legacy import Buffer as Legacy
    from deep_ep.utils.event import EventOverlap
    from nbep.deep_ep.buffers.legacy import Buffer as Renamed
    from nbep.deep_ep.utils.math import align

    assert deep_ep.Buffer is Buffer is Legacy is Renamed
    assert align is deep_ep.utils.align
    assert deep_ep.EventOverlap is EventOverlap
    assert deep_ep.Config is deep_ep_cpp.Config is compiled.Config
    queue.put((deep_ep.__name__, deep_ep_cpp.__name__, deep_ep.__version__))


if __name__ == "__main__":
    import nbep.deep_ep

    nbep.deep_ep.install()  # once more: run.py has done so
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    names(queue)
    print(*queue.get())
    child = context.Process(target=names, args=(queue,))
    child.start()
    print(*queue.get())
    child.join()
    print(subprocess.run([sys.executable, "-c", OTHER], check=True, capture_output=True, text=True).stdout, end="")
