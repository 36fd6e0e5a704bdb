"""Counters of both engines; a frozen engine differs from an idle one."""

from __future__ import annotations

from bakehouse.engines.base import Counters, read_counters, samples

LLAMACPP = """\
# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed.
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 9
llamacpp:tokens_predicted_total 48
llamacpp:n_decode_total 13
llamacpp:spec_decode_num_draft_tokens_total 35
llamacpp:spec_decode_num_accepted_tokens_total 33
llamacpp:spec_decode_num_drafts_total 12
llamacpp:requests_processing 1
llamacpp:requests_deferred 2
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 12
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 11
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="2"} 10
"""
VLLM = """\
vllm:num_requests_running{engine="0",model_name="m {odd}"} 1.0
vllm:num_requests_running{engine="1",model_name="m {odd}"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:generation_tokens_total{engine="0",model_name="m"} 1e+02
vllm:prompt_tokens_total{engine="0",model_name="m"} 7.0 1700000000000
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 3.0
"""


def test_counters_of_llama_cpp() -> None:
    seen = read_counters(LLAMACPP)
    assert seen is not None
    assert seen.busy
    assert seen == Counters(48, 9, 13, 1, 2, 12, 35, 33, (12, 11, 10))


def test_counters_of_vllm_are_summed_over_its_workers() -> None:
    seen = read_counters(VLLM)
    assert seen is not None
    assert (seen.running, seen.waiting, seen.generated, seen.prompted) == (3, 0, 100, 7)
    assert (seen.decodes, *seen.per_position) == (None, 0, 3)


def test_counters_of_other_texts_are_none() -> None:
    texts = ("", None, "<html>metrics</html>", "other_total 3\n", "llamacpp:n_decode_total x\n")
    assert [text for text in texts if read_counters(text)] == []


def test_counters_ignore_hostile_positions() -> None:
    name = "llamacpp:spec_decode_num_accepted_tokens_per_pos_total"
    text = f'{name}{{position="999999999"}} 1\n{name}{{position="-1"}} 1\nllamacpp:n_decode_total 1'
    seen = read_counters(text)
    assert seen is not None
    assert seen.per_position == ()


def test_counters_read_labels_with_quotes() -> None:
    [one] = samples('a:b{x="say \\"hi\\"",y="2"} NaN')
    assert one.labels == {"x": 'say \\"hi\\"', "y": "2"}


def test_counters_show_progress_if_any_of_them_moves() -> None:
    old = Counters(generated=5, prompted=5, decodes=5)
    assert Counters(generated=5, prompted=5, decodes=6).moved(old)
    assert not Counters(generated=5, prompted=5, decodes=5).moved(old)
    assert Counters(generated=0, prompted=0, decodes=1).moved(old)
    assert Counters(running=1).moved(old) is None


def test_counters_since_another_reading() -> None:
    now, before = read_counters(LLAMACPP), Counters(draft_tokens=30, per_position=(10, 10))
    assert now is not None
    since = now.since(before)
    assert (since.draft_tokens, since.running, since.per_position) == (5, 1, (2, 1, 10))
