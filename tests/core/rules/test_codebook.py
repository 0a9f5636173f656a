"""Rules for codes that look alike: what each accepts, worked out by hand and by a plain loop over its paper's words."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from outrider.core.distribution import Distribution
from outrider.core.errors import InvalidOption
from outrider.core.kernels import neighbour_mass
from outrider.core.rules import codebook
from outrider.core.rules.codebook import Annealed, Grouped, Lantern, LanternPlus

P = torch.tensor([[0.4, 0.3, 0.2, 0.1, 0.0]], dtype=torch.float64)
Q = torch.tensor([[0.1, 0.2, 0.3, 0.2, 0.2]], dtype=torch.float64)
LAW = Distribution(P, None, 5)
TOP = torch.zeros(1, 1, dtype=torch.long)  # the depth below the root
NEAR = torch.tensor([[1, 2, 3, 4], [0, 2, 3, 4], [3, 4, 1, 0], [2, 4, 1, 0], [3, 2, 1, 0]])


def ratio(mass: list[float]) -> torch.Tensor:
    return (torch.tensor(mass, dtype=torch.float64) / Q[0]).clamp(max=1)


def test_neighbours_count_up_to_delta() -> None:
    chance = Lantern(neighbours=NEAR, k=2, delta=0.25).accept(LAW, P, Q, TOP)[0]
    # code 2 takes 3 (.1) and 4 (0); 3 takes 2 (.2) and 4 (0); 0's and 1's nearest are too heavy; 4 isn't in the
    # distribution
    torch.testing.assert_close(chance, ratio([0.4, 0.3, 0.3, 0.3, 0.0]))
    wide = Lantern(neighbours=NEAR, k=4, delta=1.0).accept(LAW, P, Q, TOP)[0]
    torch.testing.assert_close(wide, torch.tensor([1, 1, 1, 1, 0], dtype=torch.float64))
    torch.testing.assert_close(Lantern(neighbours=NEAR, delta=0.0).accept(LAW, P, Q, TOP)[0], (P / Q)[0].clamp(max=1))


def test_neighbours_count_up_to_a_multiple_of_the_guess() -> None:
    chance = LanternPlus(neighbours=NEAR, k=2, ratio=1.0).accept(LAW, P, Q, TOP)[0]
    # 0 takes 1 (.3 <= .4); 1's nearest is too heavy; 2 takes 3 and 4; 3's nearest is too heavy
    torch.testing.assert_close(chance, ratio([0.7, 0.3, 0.3, 0.1, 0.0]))


@pytest.mark.parametrize("distributions", [1, 7, 8, 19])
def test_mass_of_neighbours_is_that_of_a_plain_loop(distributions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(distributions)
    p = torch.rand(distributions, 40, generator=draw).softmax(1)
    near = torch.stack([torch.randperm(40, generator=draw)[:11] for _ in range(40)])
    bound = torch.rand(distributions, 40, generator=draw) / 3
    wanted = torch.zeros_like(p)
    for distribution in range(distributions):
        for code in range(40):
            total = 0.0
            for other in near[code].tolist():
                total += float(p[distribution, other])
                if total > float(bound[distribution, code]):
                    break
                wanted[distribution, code] = total
    no_end, enough = torch.full_like(p, torch.inf), torch.rand(distributions, 40, generator=draw) / 6 - 0.02
    for _ in range(2):
        torch.testing.assert_close(neighbour_mass.pooled(p, near, bound, no_end), wanted)
        found = neighbour_mass.pooled(p, near, bound, enough)
        assert (((found > enough) & (wanted > enough)) | torch.isclose(found, wanted)).all() and (found <= bound).all()
        monkeypatch.setattr(neighbour_mass, "_library", lambda: None)


def test_chances_are_the_same_where_the_mass_is_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(1)
    p, q = (8 * torch.rand(2, 16, 300, generator=draw)).softmax(-1)
    near = torch.rand(300, 300, generator=draw).argsort(1)[:, :50]
    distribution, depth = Distribution(p, None, 300), torch.zeros(1, 1, dtype=torch.long)
    rules = Lantern(neighbours=near, k=50), LanternPlus(neighbours=near, k=50)
    short = [(rule.accept(distribution, p, q, depth), rule.greedy(distribution, depth)) for rule in rules]
    monkeypatch.setattr(neighbour_mass, "_library", lambda: None)
    for rule, (chances, rivals) in zip(rules, short, strict=True):
        torch.testing.assert_close(chances, rule.accept(distribution, p, q, depth))
        assert (chances == 1).sum() == (rule.accept(distribution, p, q, depth) == 1).sum() > 0
        assert rivals.equal(rule.greedy(distribution, depth)) and rivals.any()


def test_groups_are_the_same_worked_out_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(0)
    p, q = torch.rand(2, 19, 40, generator=draw).mul(8).softmax(-1)
    p[:, 5] = p[:, 30] = p[:, 7]  # as likely: the smaller id comes first
    alike = torch.rand(40, 40, generator=draw) < 0.4
    alike |= alike.T.clone()
    ours = neighbour_mass.grouped(p, q, alike, 6, 0.02)
    monkeypatch.setattr(neighbour_mass, "_library", lambda: None)
    for one, other in zip(ours, neighbour_mass.grouped(p, q, alike, 6, 0.02), strict=True):
        torch.testing.assert_close(one, other)
    assert (ours[0] > 1.01 * p).any() and (ours[0] == p).any()


def test_without_a_table_ids_are_a_scale() -> None:
    chance = Lantern(k=1, delta=0.35).accept(LAW, P, Q, TOP)[0]
    torch.testing.assert_close(chance, ratio([0.7, 0.3, 0.5, 0.3, 0.0]))  # the smaller of two equally near comes first


@pytest.mark.parametrize(("size", "count"), [(2, 1), (7, 3), (9, 8), (40, 11)])
def test_the_scale_is_the_nearest_ids_the_smaller_first(size: int, count: int) -> None:
    expected = [sorted((abs(a - b), b) for b in range(size) if b != a)[:count] for a in range(size)]
    assert codebook._scale(size, count).tolist() == [[b for _, b in row] for row in expected]


def test_large_codebooks_have_no_table_of_all_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    near = codebook._scale(65_536, 20)  # all pairs of ids would be 34 GB
    assert near.shape == (65_536, 20) and near[30_000, :4].tolist() == [29_999, 30_001, 29_998, 30_002]
    torch.manual_seed(0)
    codes, p, q = torch.randn(30, 3), torch.randn(4, 30).softmax(-1), torch.randn(4, 30).softmax(-1)
    rule = Grouped(codes=codes, span=5, gap=0.1, reach=1.2)
    law = Distribution(p, None, 30)
    table = rule.accept(law, p, q, TOP)
    monkeypatch.setattr(codebook, "_LARGE", 8)
    monkeypatch.setattr(neighbour_mass, "_PAIRS", 7)
    monkeypatch.setattr(Grouped, "_similar", None)
    torch.testing.assert_close(rule.accept(law, p, q, TOP), table)
    assert (table > (p / q).clamp(max=1) + 1e-4).any(), "some codes have a group"


def test_groups_are_codes_as_likely_that_look_alike() -> None:
    codes = torch.tensor([[0.0], [0.1], [5.0], [0.2], [5.1]])
    rule = Grouped(codes=codes, span=2, gap=0.25, reach=1.0)
    mass, drawn = [], []
    order = P[0].argsort(descending=True, stable=True).tolist()
    for code in range(5):
        rank = order.index(code)
        group = [
            other
            for other in order[max(rank - 2, 0) : rank + 3]
            if abs(P[0, other] - P[0, code]) < 0.25 and abs(codes[other] - codes[code]) < 1.0
        ]
        mass.append(float(P[0, group].sum()))
        drawn.append(float(Q[0, group].sum()))
    wanted = (torch.tensor(mass) / torch.tensor(drawn)).clamp(max=1).double() * (P[0] > 0)
    torch.testing.assert_close(rule.accept(LAW, P, Q, TOP)[0], wanted, rtol=1e-6, atol=1e-6)


def test_annealing_without_a_length_is_strict_in_the_end_and_never_stricter() -> None:
    rule = Annealed(weight=3.0, length=0)
    strict = (P / Q)[0].clamp(max=1)
    last = rule.accept(LAW, P, Q, TOP + 40)[0]
    torch.testing.assert_close(last, strict, atol=1e-9, rtol=0)
    for depth in range(4):
        assert (rule.accept(LAW, P, Q, TOP + depth)[0] >= strict).all()
    assert rule.accept(LAW, P, Q, TOP)[0, 3] == 1 and rule.accept(LAW, P, Q, TOP)[0, 4] == 0


def test_annealing_is_on_average_its_weight_and_exact_where_it_is_below_one() -> None:
    rule, q = Annealed(weight=1.1, nu=0.7, length=5), torch.ones_like(P)  # so that nothing is capped
    w = [float(rule.accept(LAW, P / 10, q, TOP + depth)[0, 0] / (P[0, 0] / 10)) for depth in range(5)]
    assert sum(w) / 5 == pytest.approx(1.1)
    assert all(later / w_ == pytest.approx(math.exp(-0.7)) for w_, later in itertools.pairwise(w))
    for depth, scale in enumerate(w):
        f = rule.accept(LAW, P, Q, TOP + depth)
        left = (P - Q * f).clamp(min=0)
        emitted = Q * f + (1 - (Q * f).sum()) * left / left.sum()
        assert (float((emitted - P).abs().sum()) > 1e-3) == (scale > 1), depth


def test_options_out_of_range() -> None:
    for make in (
        lambda: Lantern(delta=-0.1),
        lambda: LanternPlus(ratio=-1),
        lambda: Grouped(span=-1),
        lambda: Annealed(weight=0.5),
    ):
        with pytest.raises(InvalidOption, match="exact"):
            make()
    assert not Grouped(gap=0, reach=0).lossless  # both may be 0
    for kind in (Lantern, LanternPlus):
        assert kind(k=1).k == 1
        with pytest.raises(InvalidOption, match="1 or more"):
            kind(k=0)
    for gap, reach in ((-1e-9, 0.5), (0.1, -1e-9), (float("nan"), 0.5)):
        with pytest.raises(InvalidOption, match="both must be 0 or more"):
            Grouped(gap=gap, reach=reach)
    with pytest.raises(InvalidOption, match=r"expected \[5, 2 or more\]"):
        Lantern(neighbours=NEAR[:3], k=2).accept(LAW, P, Q, TOP)
    with pytest.raises(InvalidOption, match="vocabulary is 5"):
        Grouped(codes=torch.eye(3)).accept(LAW, P, Q, TOP)
