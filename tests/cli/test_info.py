"""``kernelhub info``: what the record of a kernel says."""

from __future__ import annotations

from kernelhub.dispatch.hub import HUB


def test_it_says_what_a_kernel_takes_needs_and_lacks_for_each_op(ask):
    answer = ask("info", "triton.split_kv")
    assert answer.code == 0
    for op in ("attention", "paged_attention", "mla_attention"):
        assert f"triton.split_kv of {op}: " in answer.out
    assert "H200" in answer.row("verified")
    assert answer.row("needs").startswith("needs            triton >=")
    assert "head_dim_qk: 16 to 256" in answer.row("limits")


def test_one_op_alone_and_json_hold_the_record(ask):
    (told,) = ask("info", "paged_attention:triton.split_kv", "--json").json["kernels"]
    record = next(k for k in HUB.registry.candidates("paged_attention").kernels if k.name == "triton.split_kv")
    assert (told["summary"], told["features"]) == (record.summary, sorted(record.features))
    assert "*/decode: 1 of " in " ".join(told["orders"])


def test_a_name_that_means_nothing_is_answered_with_the_nearest(ask):
    answer = ask("info", "triton.spilt_kv")
    assert (answer.code, answer.out) == (2, "")
    assert "'triton.spilt_kv' is not a kernel (did you mean triton.split_kv?)" in answer.err
    assert "'xformers' is a backend; give one of its kernels: xformers." in ask("info", "xformers").err
    assert "did you mean attention?" in ask("info", "atention:triton.split_kv").err
