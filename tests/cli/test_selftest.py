from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from cli import selftest as module
from cli.main import main
from pyluce.native.errors import UnsupportedOpError
from pyluce.selftest import products, run
from pyluce.selftest.expected import describe_device, missing_kernels
from pyluce.selftest.run import Result

GOOD = Result("hc_mix", "T 3", 1e-7, 2e-5, 0.1, True, paths=("hc_mix", "wide"))
REFUSED = Result("mul_mat Q2_K row", "512x96", float("inf"), 2e-2, 0.0, True, "not this type")
BAD = Result("gdn", "3 tokens", float("inf"), 1e-4, 0.1, False)


def use(monkeypatch: pytest.MonkeyPatch, *results: Result) -> None:
    def fake(device: str, *, model_sizes: bool) -> Iterator[Result]:
        yield from results

    monkeypatch.setattr(module, "run", fake)


def test_prints_each_test_and_exits_with_0(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    use(monkeypatch, GOOD, REFUSED)
    assert main(["doctor", "--selftest"]) == 0
    out = capsys.readouterr().out
    assert "ok: hc_mix, T 3: 1.0e-07 of 2e-05 by hc_mix, wide\n" in out and "refused: mul_mat Q2_K row, 512x96" in out
    assert ": 0 failed, 1 refused by the device" in out


def test_a_failure_exits_with_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    use(monkeypatch, GOOD, BAD)
    assert main(["doctor", "--selftest"]) == 1
    assert "FAILED: gdn, 3 tokens: error inf" in capsys.readouterr().out
    assert main(["doctor", "--selftest", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["failed"] == 1 and document["results"][1]["error"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cpu"], "--device: expected --selftest with it"),
        (["--quick"], "--quick: expected --selftest with it"),
        (["--selftest", "--device", "gpu"], "--device: expected cpu, cuda:N, hip:N or rpc:HOST:PORT, found 'gpu'"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--selftest", "--device", "hip:9"]) == 1
    assert "hip" in capsys.readouterr().err


def test_the_cpu_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "SEEDS", range(1))
    monkeypatch.setattr(run, "SHAPES", run.SHAPES[::2])
    monkeypatch.setattr(products, "REQUIRED_TYPES", ("F32", "Q8_0"))
    monkeypatch.setattr(products, "OTHER_TYPES", ("Q4_0",))
    results = list(run.run("cpu", model_sizes=False))
    assert [r for r in results if not r.ok] == [] and not any(r.refused for r in results)
    assert all(r.paths for r in results), "which kernel ran is always known"
    of = {r.op: r.paths for r in results}
    assert of["gdn"] == ("gdn",) and of["mul_mat F32 row"] == of["mul_mat_id Q8_0 row"] == ("vec_dot",)
    assert of["mul_mat Q8_0 row"] == (("row tiles",) if " AVX2 " in describe_device("cpu") else ("vec_dot",))
    assert {"vec_dot", "sgemm", "tiled", "repacked gemm"} >= {
        p for op, ps in of.items() if " chunk" in op for p in ps
    } - {"repacked gemv"}
    kinds = {r.op.split()[0].strip(",") for r in results}
    assert {"hc_init", "gdn", "qsa_attn", "ple_gate", "route", "moe_combine", "mul_mat", "mul_mat_id"} <= kinds


def test_a_device_that_takes_another_kernel_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = ("qsa_attn", "float16 K/V, 24/2 heads of 256, 2600 tokens")
    for device in ("compute capability 9.0", "compute capability 8.6", "gfx1151", "gfx1201"):
        assert missing_kernels(device, *attention, ("qsa_attn", "scalar f16")) == ["mma"]
        assert missing_kernels(device, *attention, ("qsa_attn", "mma")) == []
    assert missing_kernels("gfx906", *attention, ("qsa_attn", "scalar f16")) == [], "it has no matrix units"
    assert (
        missing_kernels("compute capability 9.0", "mul_mat_id IQ4_NL chunk", "512x64", ("chunk tile of few columns",))
        == []
    )
    slow = Result("mul_mat Q8_0 chunk repacked", "512x96", 1e-3, 2e-2, 0.1, True, paths=("vec_dot",))
    monkeypatch.setattr(run, "_all", lambda device, model_sizes: iter([slow]))
    (result,) = run.run("cpu")
    assert not result.ok and "expected the kernel repacked gemm and repacked gem[mv], found vec_dot" in result.note


def test_a_type_that_the_device_refuses_fails_only_if_files_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise UnsupportedOpError("no such product")

    monkeypatch.setattr(products.Product, "rows", refuse)
    shape = run.SHAPES[0]
    needed = run._product("Q8_0", shape, run.Phase.ROW, "cpu", required=True)
    other = run._product("Q8_0", shape, run.Phase.ROW, "cpu", required=False)
    assert not needed.ok and other.refused and "no such product" in other.note
