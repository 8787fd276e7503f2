"""Small kernels that run together, and what they do with a few bytes that all of them share."""

from nbep.emulator import DataRace, World, current_thread

DATA, FLAG, FLAG_2 = 0, 64, 96  # bytes that the patterns use
MBARRIER = 256  # shared bytes at which load_in_bulk puts it
STARTED = 1020


def run_together(kernels, seed, describe=None, strategy="uniform"):
    """Run kernels (rank, function(t, memory), grid, block) at once; all start before any goes on.

    The memory is 1024 zeroed bytes of the last rank, of which the last four are taken. describe: what its bytes are
    called
    """
    num_ranks = 1 + max(rank for rank, *_ in kernels)
    world = World(num_ranks, seed, memory_model="checked", strategy=strategy)
    owner = world.ranks[num_ranks - 1]
    memory = owner.space.allocate(1024, "memory", zero=True, describe=describe)
    streams = []
    for rank, function, grid, block in kernels:
        mine = memory if rank == num_ranks - 1 else world.ranks[rank].space.open(memory.handle)

        def kernel(address, function=function):
            t = current_thread()
            if t.block_idx == 0 and t.thread_idx == 0:
                t.atomic("add", address + STARTED, "s32", 1, "relaxed", "sys")
            wait_for(address + STARTED, "relaxed", at_least=len(kernels))
            function(t, address)

        streams.append(world.ranks[rank].create_stream("stream"))
        streams[-1].launch(kernel, (mine.address,), grid, block, 512, function.__name__)
    for stream in streams:
        stream.synchronize()


def wait_for(flag, order="acquire", scope="sys", at_least=1):
    t = current_thread()
    while t.load(flag, "s32", order, scope) < at_least:
        t.spin(10**12)


def put(t, address, value=1):
    t.store(address, "s32", value, "weak", "cta")


def take(t, address):
    assert t.load(address, "s32", "weak", "cta") == 1


def write_words(t, memory):
    for i in range(8):
        put(t, memory + DATA + 4 * i)
    t.store(memory + FLAG, "s32", 1, "release", "sys")


def read_payload(t, memory):
    wait_for(memory + FLAG)
    take(t, memory + DATA)


def load_in_bulk(t, address):
    """Eight words to shared byte 0, by a bulk copy."""
    t.mbarrier_init(MBARRIER, 1)
    t.bulk_load(0, address, 32, MBARRIER)
    t.mbarrier_arrive_expect_tx(MBARRIER, 32)
    while not t.mbarrier_try_wait(MBARRIER, 0):
        pass
    assert t.load_shared(0, "s32", "weak") == 1


def store_in_bulk(t, address):
    """Eight words from shared byte 0; no thread waits for it yet."""
    for i in range(8):
        t.store_shared(4 * i, "s32", 1, "weak")
    t.fence_proxy_async()
    t.bulk_store(address, 0, 32)


SEEDS = range(8)


def pass_message(write, read, *, ranks=1, seed=0, block=1, grid=1):
    """Two kernels: rank 0 runs write(t, ring), and the last rank read(t, ring), which has to wait for it somehow."""
    run_together([(0, write, grid, block), (ranks - 1, read, 1, 1)], seed)


def races(write, read, **options):
    """How many of the seeds end in a DataRace, or else in a payload that is not there."""
    count = 0
    for seed in SEEDS:
        try:
            pass_message(write, read, seed=seed, **options)
        except (DataRace, AssertionError):
            count += 1
    return count
