"""The README on a package index, and the pages of the site that are made at build time: all are there, and complete."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))

import build_dist  # noqa: E402
import comm_plots  # noqa: E402
import docs_pages  # noqa: E402
import relative_time  # noqa: E402

from kernelhub.cli.main import COMMANDS  # noqa: E402
from kernelhub.ops import functions  # noqa: E402

README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("url", ["", "https://example.com/kernelhub"])
def test_no_link_of_the_readme_is_relative_on_a_package_index(url) -> None:
    shown = build_dist.for_an_index(README, url)
    targets = re.findall(r"\]\(([^)]+)\)", shown)
    assert all(target.startswith("https://") for target in targets)
    assert len(targets) == (0 if not url else len(re.findall(r"\]\(([^)]+)\)", README)))
    assert "<!--" not in shown


def test_the_readme_opens_with_sentence_install_call_table_and_picture() -> None:
    places = [
        README.index(sign) for sign in ("LLM serving engines", "pip install", "import torch, kernelhub", "| case |")
    ]
    places.append(README.index("](docs/images/"))
    assert places == sorted(places)


def test_the_table_of_the_readme_shows_the_best_first_and_losses_too() -> None:
    ratios = [float(ratio) for ratio in re.findall(r"\| ([0-9.]+) x \|", README)]
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[0] > 1 > ratios[-1]


def test_every_case_that_torch_can_run_counts_in_the_picture() -> None:
    rows, _ = relative_time.ratios("h200")
    picture = (ROOT / "docs" / "images" / "relative_time_h200.svg").read_text()
    for row in rows:
        assert f">{row.op}</text>" in picture
        assert f">{row.mean:.2f}; " in picture


@pytest.mark.parametrize("op", [function.op.contract.name for function in functions()])
def test_the_page_of_an_op_shows_its_kernels_features_and_facets(op) -> None:
    page = docs_pages.op_page(op)
    contract = docs_pages.ops()[op].op.contract
    assert f".{op}\n" in page
    for kernel in docs_pages.ops()[op].kernels():
        assert page.count(f"| `{kernel}` |") >= 2
    for facet in contract.schema.facets:
        assert facet == "device" or f"| `{facet}` |" in page


def test_every_kernel_is_on_the_page_of_its_backend() -> None:
    pages = {name: docs_pages.backend_kernels(name) for name in docs_pages.backends()}
    for function in functions():
        for kernel in function.kernels():
            assert f"| `{kernel}` |" in pages[kernel.partition(".")[0]]


def test_the_reference_of_the_command_line_is_what_the_parsers_print() -> None:
    page = docs_pages.commands_page()
    for name in COMMANDS:
        assert f"## kernelhub {name}\n" in page
        assert f"usage: kernelhub {name}" in page


def test_the_site_shows_signatures_once() -> None:
    page = docs_pages.for_the_site((ROOT / "docs" / "attention.md").read_text())
    assert "(ops/paged_attention.md)" in page
    assert "made by scripts/generate_docs.py" not in page


def test_plots_of_ranks_show_every_kernel_that_was_measured() -> None:
    """What is drawn; matplotlib is not asked for."""
    for name in comm_plots.SUMS:
        result = json.loads((comm_plots.RESULTS / f"{name}.json").read_text())
        for op, lines in comm_plots.lines_of_sums(result).items():
            measured = {row["kernel"] for row in result["rows"] if row["op"] == op and not row.get("format")}
            assert set(lines) == measured
    for name in comm_plots.EXPERTS:
        (lines,) = comm_plots.lines_of_experts(json.loads((comm_plots.RESULTS / f"{name}.json").read_text())).values()
        assert {"triton.push", "torch.gather_fixed, torch.reduce_scatter_fixed"} <= set(lines)
        assert all(len(points) > 1 for points in lines.values())
