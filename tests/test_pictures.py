"""Pictures show the weights that the recipes' formulas say."""

import xml.dom.minidom

import pytest

import proxpo
from proxpo.errors import ProxpoError
from proxpo.pictures import panels, picture, same_picture
from proxpo.recipes import methods


def curves(name: str, **options: float) -> dict[tuple[str, bool], list[tuple[float, float]]]:
    [axes, _], _ = panels(proxpo.make_recipe(name, options))
    return {(line.style, line.dashed): list(line.points) for line in axes.lines}


def test_the_clip_of_ppo():
    lines = curves("grpo", clip_low=0.3, clip_high=0.5)
    assert lines.keys() == {("up", False), ("down", False)}
    for x, y in lines["up", False][1:-1]:
        assert y == pytest.approx(x if x < 1.5 else 0.0, abs=1e-9)
    for x, y in lines["down", False][1:-1]:
        assert y == pytest.approx(-x if x > 0.7 else 0.0, abs=1e-9)
    assert min(abs(x - 1.5) for x, _ in lines["up", False]) < 1e-4


def test_one_token_and_its_response_where_ratios_are_those_of_sequences():
    lines = curves("gspo")
    for x, y in lines["up", False][1:-1]:  # s = r^(1/1000), clipped at 1.0004
        s = x ** (1 / 1000)
        assert y == pytest.approx(s if s < 1.0004 else 0.0, abs=1e-6)
    for x, y in lines["down", True][1:-1]:  # s = r, clipped at 0.9997
        assert y == pytest.approx(-x if x > 0.9997 else 0.0, abs=1e-6)


def test_ess_falls_as_half_of_the_batch_moves():
    for x, y in curves("p3o")["up", True][1:-1]:
        ess = (1 + x) ** 2 / (2 * (1 + x * x))
        assert y == pytest.approx(min(x, ess) - (1 - ess) * (1 - 1 / x), abs=1e-6)


def test_a_weight_without_a_ratio_is_flat():
    assert {round(y, 9) for _, y in curves("reinforce")["down", False]} == {-1.0}


@pytest.mark.parametrize("name", ["isopo", "sfpo", "knapsack-rl", "palu", "props", "rosa", "fixpo"])
def test_what_acts_around_the_loss_has_a_panel_of_its_own(name):
    svg = picture(name)
    xml.dom.minidom.parseString(svg)
    assert len(svg) < 10_000
    assert "weights in a batch" not in svg or name == "isopo"


def test_rounding_errors_are_no_difference():
    a = '<path d="M1.2 3"/>'
    assert same_picture(a, '<path d="M1.3 3"/>')
    assert not same_picture(a, '<path d="M1.4 3"/>')
    assert not same_picture(a, '<path d="M1.2 3L4 5"/>')


def test_every_option_of_every_method_is_explained():
    for slug, method in methods().items():
        texts = method.explained()
        assert texts.keys() == method.defaults.keys()
        assert all(texts.values()), (slug, [name for name, text in texts.items() if not text])


def test_the_command(tmp_path):
    from proxpo.cli.catalogue import write_picture

    file = tmp_path / "wide.svg"
    write_picture("grpo", ["clip_high=0.9"], str(file))
    assert not same_picture(file.read_text(), picture("grpo"))
    with pytest.raises(ProxpoError, match="expected a file name"):
        write_picture("grpo", [], str(tmp_path / "wide.png"))
