import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pvg.verifier.scorer import ScoreCache, ScoreKey, digest_of


def key(number: int, version: str = "v1", template: str = "t") -> ScoreKey:
    return ScoreKey(version, template, bytes([number]))


def test_the_least_recently_asked_for_goes_first_and_all_is_counted():
    cache = ScoreCache(2)
    cache.put(key(1), 1.0)
    cache.put(key(2), 2.0)
    assert cache.get(key(1)) == 1.0
    cache.put(key(3), 3.0)
    assert cache.get(key(2)) is None
    assert (cache.get(key(1)), cache.get(key(3))) == (1.0, 3.0)
    assert (cache.hits, cache.misses, cache.evictions, len(cache)) == (3, 1, 1, 2)


@given(capacity=st.integers(1, 4), asked=st.lists(st.integers(0, 6), max_size=40))
def test_it_holds_exactly_the_last_distinct_keys(capacity, asked):
    cache = ScoreCache(capacity)
    for number in asked:
        if cache.get(key(number)) is None:
            cache.put(key(number), float(number))
    newest_first = list(dict.fromkeys(reversed(asked)))
    digests = {number for number in range(7) if key(number) in cache._scores}
    assert digests == set(newest_first[:capacity])
    assert cache.hits + cache.misses == len(asked)
    assert cache.misses - cache.evictions == len(cache)


def test_a_digest_names_the_tokens_and_the_solutions_start():
    ids = np.arange(8, dtype=np.int32)
    assert digest_of(ids, 3) == digest_of(ids.astype(np.int64), 3) == digest_of(np.repeat(ids, 2)[::2], 3)
    assert len({digest_of(ids, 3), digest_of(ids, 4), digest_of(ids[:-1], 3), digest_of(ids[::-1], 3)}) == 4


def test_entries_restore_in_order_and_as_far_as_they_fit():
    cache = ScoreCache(4)
    keys = [ScoreKey("v1", "t", digest_of(np.array([n], dtype=np.int32), 0)) for n in range(4)]
    for number, entry in enumerate(keys):
        cache.put(entry, number / 3)
    smaller = ScoreCache(3)
    smaller.restore("v1", "t", *cache.entries())
    assert [smaller.get(entry) for entry in keys] == [None, 1 / 3, 2 / 3, 1.0]
    empty = ScoreCache(3)
    empty.restore("v1", "t", *ScoreCache(1).entries())
    assert len(empty) == 0
