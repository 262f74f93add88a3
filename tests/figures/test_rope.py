"""Rotations, shifts and wavelengths."""

import numpy as np

from transformer.figures.data import rope


def test_positions_moved_together_leave_the_score():
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 16)).astype(np.float32)
    for name, one in rope.scalings(dim=16, theta=100.0, factor=4.0, original=32).items():
        first = np.arange(40)
        scores = rope.scores(one, q, k, first + 5, first)
        np.testing.assert_allclose(scores, scores[0], atol=2e-4, err_msg=name)
        assert np.ptp(rope.scores(one, q, k, first, np.zeros_like(first))) > 1, "but distance changes it"


def test_equal_contents_score_the_cosines_of_their_angles():
    one, vector = rope.plain(8, 100.0), rope.content(8)
    distances = np.arange(30)
    frequencies = 100.0 ** -(np.arange(4) / 4)
    expected = np.cos(distances[:, None] * frequencies).sum(axis=1)
    np.testing.assert_allclose(rope.scores(one, vector, vector, distances, 0 * distances), expected, atol=1e-4)
    single = rope.plain(2, 100.0)
    turn = rope.scores(single, rope.content(2), rope.content(2), np.array([0, np.pi, 2 * np.pi]), np.zeros(3))
    np.testing.assert_allclose(turn, [1, -1, 1], atol=1e-5)


def test_pairs_turn_by_their_wavelengths():
    one = rope.plain(8, 10.0)
    angles = np.unwrap(
        np.arctan2(*np.moveaxis(rope.pairs(rope.turned(one, rope.content(8), np.arange(6))), -1, 0)[::-1]), axis=0
    )
    np.testing.assert_allclose(np.diff(angles, axis=0), np.tile(2 * np.pi / rope.wavelengths(one), (5, 1)), atol=1e-5)
    np.testing.assert_allclose(rope.wavelengths(one)[0], 2 * np.pi, rtol=1e-6)


def test_scalings_stretch_what_they_should():
    waves = {name: rope.wavelengths(one) for name, one in rope.scalings(factor=8.0, original=8192).items()}
    stretch = {name: wave / waves["plain"] for name, wave in waves.items()}
    np.testing.assert_allclose(stretch["linear"], 8, rtol=1e-5)
    for name in ("piecewise", "yarn", "larger base"):
        np.testing.assert_allclose([stretch[name][0], stretch[name][-1]], [1, 8], rtol=1e-4, err_msg=name)
        assert (np.diff(stretch[name]) > -1e-6).all()
    short = waves["plain"] < 8192 / 4  # with more than four turns in the trained length nothing is stretched
    np.testing.assert_allclose(stretch["piecewise"][short], 1, rtol=1e-5)
    np.testing.assert_allclose(stretch["piecewise"][waves["plain"] > 8192], 8, rtol=1e-5)
