"""Reading a server's answers: all that is right is kept, all that is wrong is named."""

import copy
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_opo.batch import Prompt
from megatron_opo.errors import DataError, OnPolicyError
from megatron_opo.rollout.answers import (
    BadAnswerError,
    check_ids,
    read_prefill_logprobs,
    read_samples,
    token_versions,
)

VOCAB = 50
PROMPT = Prompt("e0-17", (3, 9, 4), "2+2=", "arith", "4")


def item(ids, logprobs, spans=((7, None),), finish="stop"):
    """An answer as SGLang 0.5.23 gives it; `spans` are (version, length), None: the rest."""
    placed, at = [], 0
    for version, length in spans:
        end = len(ids) if length is None else at + length
        placed.append({"version": str(version), "start": at, "end": end})
        at = end
    return {
        "text": "4",
        "output_ids": list(ids),
        "meta_info": {
            "finish_reason": {"type": finish, "matched": 1},
            "weight_version": placed[-1]["version"],
            "weight_versions": placed,
            "completion_tokens": len(ids),
            "output_token_logprobs": [[p, i, None] for p, i in zip(logprobs, ids, strict=True)],
        },
    }


def read(answer, count=1, version=7):
    return read_samples(
        answer, PROMPT, count=count, vocab_size=VOCAB, server="http://s:1", version=version
    )


responses = st.lists(
    st.tuples(st.integers(0, VOCAB - 1), st.floats(-50, 0, allow_nan=False)), min_size=1, max_size=9
)


@given(st.lists(responses, min_size=1, max_size=4))
def test_good_answers_are_kept_as_they_are(groups):
    answer = [item([i for i, _ in r], [p for _, p in r]) for r in groups]
    samples = read(answer, count=len(groups))
    for index, (sample, response) in enumerate(zip(samples, groups, strict=True)):
        assert sample.group_id == "e0-17"
        assert sample.index == index
        assert list(zip(sample.response_ids, sample.logprobs, strict=True)) == response
        assert sample.versions == (7,) * len(response)
        assert (sample.finish_reason, sample.text, sample.server) == ("stop", "4", "http://s:1")


def test_a_single_sample_may_come_without_a_list():
    assert read(item([1], [-0.5]))[0].response_ids == (1,)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=5))
def test_spans_give_each_token_its_version(spans):
    expected = tuple(version for version, length in spans for _ in range(length))
    meta = item([0] * len(expected), [0.0] * len(expected), spans)["meta_info"]
    assert token_versions(meta, len(expected), "s") == expected


def test_one_stale_token_is_refused_and_named():
    answer = item([1, 2, 3], [-1.0] * 3, ((6, 1), (7, None)))
    with pytest.raises(OnPolicyError, match=r"http://s:1, prompt e0-17, sample 0.*\[6, 7\].*7"):
        read(answer)
    assert read(answer, version=None)[0].versions == (6, 7, 7)


def test_a_version_that_is_no_number_is_refused():
    with pytest.raises(OnPolicyError, match="'updating'"):
        read(item([1], [-1.0], (("updating", None),)))


def broken(change):
    answer = [item([1, 2, 3], [-1.0, -2.0, -3.0]) for _ in range(2)]
    change(answer)
    return answer


def set_meta(key, value):
    return lambda answer: answer[1]["meta_info"].update({key: value})


BROKEN = {
    "sample missing": (lambda a: a.pop(), "1 samples came back, 2 were asked for"),
    "no ids": (lambda a: a[1].pop("output_ids"), "output_ids"),
    "empty": (
        lambda a: a.__setitem__(1, item([], [])),
        "sample 1 is empty",
    ),
    "id outside": (lambda a: a[1]["output_ids"].__setitem__(0, VOCAB), f"{VOCAB}, not an id"),
    "id no integer": (lambda a: a[1]["output_ids"].__setitem__(0, 1.0), "1.0, not an id"),
    "id boolean": (lambda a: a[1]["output_ids"].__setitem__(0, True), "True, not an id"),
    "other id": (lambda a: a[1]["output_ids"].__setitem__(0, 9), "its logprob is of 1"),
    "logprob missing": (
        lambda a: a[1]["meta_info"]["output_token_logprobs"].pop(),
        "3 ids, 2 logprobs",
    ),
    "count": (set_meta("completion_tokens", 4), "claims 4 tokens"),
    "aborted": (
        set_meta("finish_reason", {"type": "abort", "message": "out of memory"}),
        "'abort' out of memory",
    ),
    "gap in spans": (
        set_meta("weight_versions", [{"version": "7", "start": 1, "end": 3}]),
        "do not cover",
    ),
    "short spans": (
        set_meta("weight_versions", [{"version": "7", "start": 0, "end": 2}]),
        "do not cover",
    ),
    "no list": (lambda a: a.__setitem__(1, 5), "sample 1 is malformed"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_answers_are_named(name):
    change, message = BROKEN[name]
    with pytest.raises(BadAnswerError, match=message):
        read(broken(change), count=2)


@given(st.one_of(st.just(math.nan), st.just(math.inf), st.just(-math.inf), st.floats(0.01, 9)))
def test_logprobs_that_cannot_be_are_refused(value):
    with pytest.raises(BadAnswerError, match="token 1 of sample 0 has the logprob"):
        read(item([1, 2], [-1.0, value]))


@pytest.mark.parametrize("pair", ["", [], [-1.0], None, {}])
def test_pairs_that_are_none_are_refused(pair):
    answer = item([1], [-1.0])
    answer["meta_info"]["output_token_logprobs"] = [pair]
    with pytest.raises(BadAnswerError, match="sample 0 is malformed"):
        read(answer)


@pytest.mark.parametrize("value", [None, "-1.0", [-1.0], True])
def test_logprobs_that_are_no_numbers_are_refused(value):
    with pytest.raises(BadAnswerError, match="has the logprob"):
        read(item([1], [value]))


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**400), 10**400)
    | st.floats()
    | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@given(
    json_values,
    st.sampled_from(
        ["output_ids", "meta_info", "finish_reason", "output_token_logprobs", "weight_versions"]
    ),
)
def test_whatever_stands_in_an_answer_it_is_read_or_refused(value, key):
    answer = item([1, 2], [-1.0, -2.0])
    target = answer if key in answer else answer["meta_info"]
    target[key] = value
    try:
        sample = read(copy.deepcopy(answer))[0]
    except (BadAnswerError, OnPolicyError):
        return
    assert sample.length == len(sample.logprobs) == len(sample.versions) == 2


def test_ids_that_would_crash_a_server_are_refused():
    with pytest.raises(DataError, match=r"prompt x holds token id 50.*has 50 entries"):
        check_ids((3, 50), VOCAB, "prompt x")
    with pytest.raises(DataError, match="token id -1"):
        check_ids((-1,), VOCAB, "prompt x")
    with pytest.raises(DataError, match="prompt x has no tokens"):
        check_ids((), VOCAB, "prompt x")
    check_ids((0, 49), VOCAB, "prompt x")


def test_prefill_logprobs_must_be_of_the_text_that_was_sent():
    answer = {"meta_info": {"input_token_logprobs": [[None, 3, None], [-0.5, 9, None]]}}
    assert read_prefill_logprobs(answer, [3, 9]) == [-0.5]
    with pytest.raises(BadAnswerError, match="other tokens"):
        read_prefill_logprobs(answer, [3, 8])
    with pytest.raises(BadAnswerError, match="malformed"):
        read_prefill_logprobs({"meta_info": {}}, [3, 8])
