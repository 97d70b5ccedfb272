"""Is what a sleep frees really free, for a process that only knows the driver?"""

from __future__ import annotations

import itertools
import random

from harness import need, note, run
from support import CUDA, GIB, GRANULE, KIB, MIB, addresses, holds, intact, make, scaled
from witness import Witness

import cumem

ROUNDS = 20
SIZES = (scaled(3 * GIB) + 5, scaled(2 * GIB), scaled(700 * MIB), 30 * MIB, 5 * MIB, KIB, 1)


def settle() -> None:
    """One round that sets up what is set up once (kernels, streams, host memory)."""
    cumem.sleep()
    cumem.wake_up()


def slack() -> int:
    return GRANULE * sum(tag.segments for tag in cumem.stats().tags)


def memory_is_back_for_others() -> None:
    need(CUDA, "CUDA device")
    with Witness() as witness:
        weights = make("weights", SIZES)
        cache = make("kv_cache", (scaled(GIB), 20 * MIB))
        settle()
        live = sum(tensor.numel() for tensor in (*weights, *cache))
        before = witness.free_bytes()
        report = cumem.sleep()
        asleep = witness.free_bytes()
        cumem.wake_up()
        awake = witness.free_bytes()
        note(f"live {live}, freed {report.freed_bytes}, seen from outside {asleep - before}")
        assert report.freed_bytes >= live
        assert asleep - before >= report.freed_bytes - slack()
        assert abs(awake - before) <= slack()
        assert intact(weights)


def one_tag_gives_back_its_own_part() -> None:
    need(CUDA, "CUDA device")
    with Witness() as witness:
        weights = make("weights", SIZES)
        make("kv_cache", (scaled(GIB), 20 * MIB))
        settle()
        free = [witness.free_bytes()]
        freed = []
        for tag in ("kv_cache", "weights"):
            freed.append(cumem.sleep(tags=[tag]).freed_bytes)
            free.append(witness.free_bytes())
        for tag in ("weights", "kv_cache"):
            cumem.wake_up([tag])
            free.append(witness.free_bytes())
        steps = [after - before for before, after in itertools.pairwise(free)]
        for seen, wanted in zip(steps, (freed[0], freed[1], -freed[1], -freed[0]), strict=True):
            assert abs(seen - wanted) <= slack(), (steps, freed)
        assert intact(weights)


def another_process_uses_the_memory_in_every_round() -> None:
    """The device is nearly full, so that only what the sleep freed can be taken."""
    need(CUDA, "CUDA device")
    with Witness() as witness:
        weights = make("weights", SIZES)
        where = addresses(weights)
        settle()
        held = witness.take_all_but("rest", GIB)
        note(f"the other process holds {held} bytes all the time")
        for number in range(ROUNDS):
            freed = cumem.sleep().freed_bytes
            taken = witness.take("booty", freed * 95 // 100)
            assert taken >= sum(SIZES) * 9 // 10
            witness.dirty("booty", number)
            witness.give_back("booty")
            cumem.wake_up()  # no second try
            assert addresses(weights) == where
            assert intact(weights), f"round {number}"


def random_sets_survive_a_dirty_neighbour() -> None:
    need(CUDA, "CUDA device")
    with Witness() as witness:
        for number in range(8):
            chance = random.Random(number)
            sizes = [int(2 ** chance.uniform(0, 28)) for _ in range(60)]
            kept = dict(enumerate(make("weights", sizes)))
            for dropped in chance.sample(sorted(kept), 15):
                del kept[dropped]
            freed = cumem.sleep().freed_bytes
            witness.take("booty", freed)
            witness.dirty("booty", 101 + number)
            witness.give_back("booty")
            cumem.wake_up()
            wrong = [seed for seed, tensor in kept.items() if not holds(tensor, seed)]
            assert not wrong, (number, wrong)


if __name__ == "__main__":
    run(
        [
            memory_is_back_for_others,
            one_tag_gives_back_its_own_part,
            another_process_uses_the_memory_in_every_round,
            random_sets_survive_a_dirty_neighbour,
        ]
    )
