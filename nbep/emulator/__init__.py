"""A seeded emulator of GPU threads: all threads of all blocks of all ranks, interleaved at every primitive.

It knows nothing of expert parallelism.  Its parts, in an order to read them in:

    world      all ranks of a run; `run` is the same without words; `process` has one rank a process, as under mpiexec
    machine/   what a GPU is made of
        kinds, memory   bytes at addresses, one address space per rank; `remote` is memory that only messages reach
        access, thread  what one thread can do
        block, warp     where threads meet
        bulk            copies that happen later, and the mbarriers that say when
        stream, sms     launches and events; how many blocks there is room for
        orders          memory orders and scopes
        errors, faults  what can go wrong, as exceptions and as facts; `source` finds the line of code that did
        world           what all these need of the world above them
    models/    when a store is seen, and what must be ordered
        delayed         stores that are seen as late as their order allows, loads that are early: `pending`
        checked         accesses to the same bytes that nothing orders: `signals` is who has signalled whom, `races` the
                        check, `copies` bulk copies, `knowledge` what threads know of each other's
    schedule/  who runs next: `scheduler` runs them, `strategies` make the choices
    tracing    calls an observer at every access
    reports/   what a stopped run says; `world` knows which of them has the words for a fact
        faults          why an access failed; `unwritten` who would have stored there; `collectives` who is missing
        race            who did not order what: `chains` and `race_cause` find the end that is too weak,
                        `missing_wait` a wait that is missing, or a signal that says too much; `causes` has the
                        sentences
        deadlock        who waits for whom: `waiting` groups the threads and knows who stored where, `expected` asks
                        them what they want to see,
                        `hang_cause` finds the wait that holds up the others, `hang_words` says so

Imports point from `world` down, never back: machine, models and schedule raise facts, and `reports` words them.
"""

import lazy_loader

# A name is imported when somebody asks for it: __init__.pyi has them all.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
