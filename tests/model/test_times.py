"""The time of a call is that of its slowest link; files of links are checked."""

import pytest

from research.model.times import H800_FILE, Link, Links, Load, time_of

LINKS = Links(
    "made up", 10.0, home=Link(1000.0), nvlink=Link(100.0, latency_us=1.0), network=Link(50.0, 5.0, message_us=0.5)
)


def test_a_link_needs_its_bytes_by_its_rate_and_something_for_each_message():
    time = time_of({"network": Load(1_000_000, 8)}, LINKS)
    assert time.links["network"] == pytest.approx(20 + 4)
    assert time.us == pytest.approx(10 + 5 + 24)


def test_only_the_slowest_link_counts_but_the_latencies_of_all_that_are_used():
    loads = {"home": Load(4_000_000, 0), "nvlink": Load(3_000_000, 0), "network": Load(1_000_000, 0)}
    time = time_of(loads, LINKS)
    assert time.bound == "nvlink"
    assert time.us == pytest.approx(10 + 1 + 5 + 30)


def test_a_link_that_nothing_crosses_costs_nothing():
    assert time_of({"nvlink": Load(0, 0), "network": Load(0, 0), "home": Load(0, 0)}, LINKS).us == 10.0


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[network]", "[infiniband]", "infiniband.*must be call, home, name, network, nvlink"),
        ("start_us = ", "begin_us = ", r"\[call\]: got begin_us; must be start_us"),
        ("message_us = ", "messages_us = ", r"\[network\]: got .*may be latency_us, limit_gb_per_s, message_us"),
        ("latency_us = ", "latency_us = -", r"latency_us: got -.*not negative"),
        ("start_us = ", 'start_us = "x" # ', r"start_us: got 'x'"),
        ("gb_per_s = ", "gb_per_s = 0 # ", r"\[home\] gb_per_s: got 0"),
        ("[call]", "[call", "Expected"),
    ],
    ids=lambda text: text,
)
def test_a_wrong_file_of_links_is_refused(tmp_path, old, new, message):
    path = tmp_path / "links.toml"
    text = H800_FILE.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(ValueError, match=message):
        Links.read(path)
