"""The catalogue and fleet files: units converted once, the user's figures first, every mistake with its line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rollover.devices import catalogue
from rollover.devices.records import Link
from rollover.errors import ConfigError
from rollover.planner import fleet
from rollover.planner.topology import Topology
from rollover.settings import toml

TWO = """\
name = "two"
budget_per_hour = 90

[network]
gbit_s = 400
latency_us = 5

[[nodes]]
device = "h100-sxm"
num_devices = 8
count = 2

[[nodes]]
device = "l40s"
num_devices = 4
count = 3
price_per_hour = 0.5
"""


def parsed(text: str) -> fleet.Fleet:
    return fleet.parse(toml.parse(text, "fleet.toml"))


def test_every_device_of_the_catalogue_is_complete_and_states_its_doubts() -> None:
    devices = catalogue.packaged().devices
    assert {"h100-sxm", "h800-sxm", "h20", "l4", "l40s", "a100-80-sxm"} <= {*devices}
    for key, entry in devices.items():
        assert all(getattr(entry, figure) for figure in catalogue.FIGURES), key
        assert entry.source, key
        assert entry.verified == (not entry.unverified), key


@pytest.mark.parametrize(
    ("key", "total_bytes"),
    [
        ("a100-40-sxm", 40536 * 2**20),
        ("a100-80-sxm", 81251 * 2**20),
        ("h100-sxm", 81559 * 2**20),
        ("h800-sxm", 81559 * 2**20),
        ("h20", 97871 * 2**20),
        ("h200-sxm", 143771 * 2**20),
        ("b200", 183359 * 2**20),
        ("l40s", 46068 * 2**20),
        ("l4", 23034 * 2**20),
        ("a10", 23028 * 2**20),
        ("rtx-4090", 24564 * 2**20),
        ("rtx-5090", 32607 * 2**20),
        ("mi250x", 2 * 68702699520),
        ("mi300x", 206141652992),
        ("mi355x", 309220868096),
    ],
)
def test_a_device_has_the_memory_that_its_driver_reports(key: str, total_bytes: int) -> None:
    """As nvidia-smi and rocm-smi print it: error correction takes a sixteenth of GDDR6."""
    entry = catalogue.packaged().devices[key]
    assert entry.hbm_gib == pytest.approx(total_bytes / 2**30, abs=0.006)


def test_units_become_bytes_flops_and_seconds() -> None:
    both = parsed(TWO)
    h100, l40s = both.devices
    assert (h100.flops, h100.hbm_bytes_per_s, h100.hbm_bytes) == (989e12, 3350e9, 79.65 * 2**30)
    assert h100.link == Link(bytes_per_s=450e9, latency_s=1e-5), "one direction has half"
    assert h100.network == Link(bytes_per_s=50e9, latency_s=5e-6)
    assert h100.efficiency.step_s == 2e-3
    assert (h100.price_per_hour, l40s.price_per_hour) == (2.69, 0.5), "the user's first"
    assert [*both.stock.values()] == [16, 12]
    assert [n.name for n in both.nodes] == ["h100-sxm-0", "h100-sxm-1", "l40s-0", "l40s-1", "l40s-2"]
    assert both.budget_per_hour == 90


def test_the_user_overrides_figures_and_they_leave_doubt() -> None:
    text = TWO.replace("l40s", "l4") + "\n[devices.l4]\nhbm_gbps = 310\nefficiency = { bandwidth = 0.9 }\n"
    l4 = parsed(text).devices[1]
    assert l4.hbm_bytes_per_s == 310e9
    assert l4.flops == 121e12
    assert l4.unverified == ()
    assert (l4.efficiency.bandwidth, l4.efficiency.train) == (0.9, 0.40)
    known = TWO.replace("l40s", "l4")
    assert parsed(known).devices[1].unverified == ("hbm_gbps",)
    assert parsed(known + "[devices.l4]\nverified = true\n").devices[1].unverified == ()
    assert parsed(TWO + '[devices.l40s]\nunverified = ["hbm_gib"]\n').devices[1].unverified == ("hbm_gib",)


def test_a_file_of_devices_stands_between_catalogue_and_fleet(tmp_path: Path) -> None:
    (tmp_path / "measured.toml").write_text(
        "[efficiency]\nlink = 0.7\n[devices.mine]\nbf16_tflops = 1\nhbm_gbps = 2\nhbm_gib = 3\nlink_gbps = 4\n"
    )
    (tmp_path / "fleet.toml").write_text(
        'catalogues = ["measured.toml"]\n[[nodes]]\ndevice = "mine"\nnum_devices = 2\n[devices.mine]\nhbm_gib = 30\n'
    )
    (mine,) = fleet.read_fleet(tmp_path / "fleet.toml").devices
    assert (mine.flops, mine.hbm_bytes, mine.efficiency.link) == (1e12, 30 * 2**30, 0.7)
    assert mine.price_per_hour is None
    assert mine.network == mine.link, "one node has no network"


def test_the_same_device_in_other_surroundings_is_another_type() -> None:
    text = TWO + '\n[[nodes]]\nname = "spot"\ndevice = "l40s"\nnum_devices = 4\nprice_per_hour = 0.25\n'
    assert [d.name for d in parsed(text).devices] == ["h100-sxm", "l40s@1", "l40s@spot"]
    same = TWO + '\n[[nodes]]\nname = "more"\ndevice = "l40s"\nnum_devices = 4\nprice_per_hour = 0.5\n'
    assert [d.name for d in parsed(same).devices] == ["h100-sxm", "l40s"]
    assert [*parsed(same).stock.values()] == [16, 16]


def test_relative_prices_are_a_currency_of_their_own() -> None:
    text = TWO.replace("h100-sxm", "h800-sxm").replace("l40s", "h20")
    own = text.replace("price_per_hour = 0.5\n", "")
    assert parsed(own).currency == "L20"
    assert [d.price_per_hour for d in parsed(own).devices] == [5.28, 1.85]
    assert parsed(TWO).currency == "USD"
    with pytest.raises(ConfigError, match=r"fleet.toml:8: nodes.0: price_per_hour of 'h800-sxm' is not known in USD"):
        parsed(text)
    assert parsed(text.replace("budget_per_hour = 90\n", "")).devices[0].price_per_hour is None


def test_the_fleet_of_the_docs_is_one() -> None:
    docs = (Path(__file__).parents[2] / "docs" / "planner.md").read_text()
    text = docs.partition("```toml\n")[2].partition("```")[0]
    found = parsed(re.sub("catalogues = .*", "", text))
    assert (found.currency, [d.price_per_hour for d in found.devices]) == ("L20", [5.28, 1.7])


def test_a_price_is_in_the_currency_that_it_was_given_in() -> None:
    with pytest.raises(ConfigError, match="price_per_hour of 'h100-sxm' is not known in EUR"):
        parsed('currency = "EUR"\n' + TWO)
    own = TWO.replace("h100-sxm", "h800-sxm").replace("l40s", "h20").replace("budget_per_hour = 90\n", "")
    own = own.replace("price_per_hour = 0.5\n", "") + "[devices.h800-sxm]\nprice_per_hour_usd = 2.5\n"
    assert parsed(own).currency == "USD"
    assert [d.price_per_hour for d in parsed(own).devices] == [2.5, None]


def test_links_join_nodes_or_all_nodes_of_an_entry() -> None:
    text = TWO + '\n[[links]]\nbetween = ["h100-sxm-0", "l40s"]\ngbit_s = 80\nlatency_us = 40\n'
    both = parsed(text)
    nodes = {n.name: i for i, n in enumerate(both.nodes)}
    topology = Topology.of(both)
    slow = Link(bytes_per_s=10e9, latency_s=4e-5)
    there, back = (nodes["h100-sxm-0"], nodes["l40s-2"]), (nodes["l40s-2"], nodes["h100-sxm-0"])
    assert topology.link(*there) == slow == topology.link(*back)
    assert topology.link(nodes["h100-sxm-1"], nodes["l40s-2"]) == both.by_name["l40s"].network
    assert topology.link(nodes["l40s-1"], nodes["l40s-1"]) == both.by_name["l40s"].link


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"l40s"', '"l40"', "fleet.toml:14: nodes.1.device: unknown device 'l40'; did you mean 'l40s'?"),
        ("num_devices = 4", "num_devices = 0", "fleet.toml:15: nodes.1.num_devices must be at least 1, got 0"),
        ("count = 2", "count = -2", "fleet.toml:11: nodes.0.count must be at least 1, got -2"),
        ("count = 2", "count = 1_000_000_000", "fleet.toml:11: nodes.0.count times num_devices must be at most 65536"),
        ("count = 3", "count = 16384", "fleet.toml:8: nodes: a fleet has at most 65536 devices; this one has 65552"),
        ("count = 2", "counts = 2", "fleet.toml:11: nodes.0.counts: unknown key; did you mean 'count'?"),
        ("= 0.5", "= -0.5", "fleet.toml:17: nodes.1.price_per_hour must be above zero, got -0.5"),
        ("= 90", "= 0", "fleet.toml:2: budget_per_hour must be above zero, got 0.0"),
        ("gbit_s = 400", "gbit_s = 0", "fleet.toml:5: network.gbit_s must be above zero, got 0.0"),
        ("count = 3", "count = [", "fleet.toml:17:1: Invalid value"),
        ("[network]\ngbit_s = 400\nlatency_us = 5\n", "", "fleet.toml:5: nodes.0: its connection to other nodes is"),
        ('"l40s"', '"h100-sxm"', "fleet.toml:13: nodes.1: another node is called 'h100-sxm"),
        (
            "[[nodes]]\ndevice",
            "[[links]]\nbetween = ['a', 'l40s']\ngbit_s = 1\n[[nodes]]\ndevice",
            "fleet.toml:9: links.0.between: unknown node 'a'; known:",
        ),
        ("[[nodes]]\ndevice", "[devices.new]\nhbm_gib = 8\n[[nodes]]\ndevice", "fleet.toml:8: devices.new: a device"),
        ("[[nodes]]\ndevice", "[devices.l4]\nhbm_gbps = -8\n[[nodes]]\ndevice", "fleet.toml:9: devices.l4.hbm_gbps"),
        (
            "[[nodes]]\ndevice",
            "[devices.l4.efficiency]\ntrain = 1.5\n[[nodes]]\ndevice",
            "fleet.toml:9: devices.l4.efficiency.train is a fraction: it must be above 0",
        ),
    ],
)
def test_a_mistake_is_named_with_its_line(old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(TWO.replace(old, new, 1))
    assert str(caught.value).splitlines()[0].startswith(message)
