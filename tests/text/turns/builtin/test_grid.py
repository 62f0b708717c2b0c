import random
import re

import pytest

from tokencredit.text.turns.builtin.grid import DIRECTIONS, DISTANCES, HOLES, MOVES, SIZE, Grid, draw, shortest

MAPS = [draw(random.Random(seed)) for seed in range(500)]


def way(start, goal, holes):
    """A shortest way, by trying all walks of a length, shortest first."""
    walks = [(start, [])]
    for _ in range(MOVES):
        longer = []
        for (row, column), words in walks:
            for word, (down, right) in DIRECTIONS.items():
                there = (row + down, column + right)
                if there == goal:
                    return [*words, word]
                if set(there) <= set(range(SIZE)) and there not in holes:
                    longer.append((there, [*words, word]))
        walks = longer
    return None


def begin(start, goal, holes):
    """A grid with this map, and its first view."""
    world = Grid()
    world.reset({"seed": 0})
    world._position, world._goal, world._holes = start, goal, frozenset(holes)
    return world


def test_the_rules_follow_the_prompt():
    rules = Grid().reset({"seed": 3})
    assert Grid().reset({"seed": 3, "prompt": "Play well. "}) == f"Play well. {rules}"


def test_a_walk_to_the_goal_pays_once_at_its_end():
    world = begin((0, 0), (1, 2), {(0, 1)})
    text = "\nMoved.\nGoal: 0 down 2 right\nUp: free\nDown: free\nLeft: wall\nRight: free\nMove:"
    assert world.step(" down") == (text, 0.0, False)
    text = "\nMoved.\nGoal: 0 down 1 right\nUp: hole\nDown: free\nLeft: free\nRight: goal\nMove:"
    assert world.step("right") == (text, 0.0, False)
    assert world.step(" Right\n") == ("\nYou reached the goal.", 1.0, True)


def test_a_hole_ends_the_episode_without_reward():
    assert begin((0, 0), (3, 3), {(0, 1)}).step("right") == ("\nYou fell into a hole.", 0.0, True)


def test_a_wall_stops_the_move():
    world = begin((3, 1), (0, 0), {(3, 2)})
    text = "\nBlocked.\nGoal: 3 up 1 left\nUp: free\nDown: wall\nLeft: free\nRight: hole\nMove:"
    assert world.step("down") == (text, 0.0, False)


@pytest.mark.parametrize("words", ["", " north", "go up", "up down", "goal", "\x00", "u" * 10_000])
def test_words_that_are_no_direction_waste_the_turn(words):
    world = begin((0, 0), (0, 2), {(3, 3)})
    view = "\nNo direction: say up, down, left or right.\nGoal: 0 down 2 right\nUp: wall\nDown: free\nLeft: wall\n"
    assert world.step(words) == (view + "Right: free\nMove:", 0.0, False)
    for _ in range(MOVES - 2):
        assert not world.step(words)[2]
    assert world.step(words) == ("\nNo moves are left.", 0.0, True)


def test_the_last_move_may_reach_the_goal():
    world = begin((0, 0), (0, 1), {(3, 3)})
    for _ in range(MOVES - 1):
        world.step("up")
    assert world.step("right") == ("\nYou reached the goal.", 1.0, True)


def test_the_row_gives_the_map():
    views = [Grid().reset({"seed": seed, "other": 1}) for seed in range(200)]
    assert views[7] == Grid().reset({"seed": 7})
    assert len(set(views)) > 50
    assert all(view.startswith(f"Reach the goal in {MOVES} moves and avoid the holes.\nGoal: ") for view in views)


def test_a_reset_forgets_the_episode_before():
    world = Grid()
    fresh = world.reset({"seed": 3})
    for _ in range(MOVES):
        world.step("north")
    assert world.reset({"seed": 3}) == fresh
    assert not world.step("north")[2]


def test_maps_can_be_solved_in_half_of_the_moves():
    assert len({*MAPS}) > 490
    for start, goal, holes in MAPS:
        assert len({start, goal, *holes}) == HOLES + 2
        walk = way(start, goal, holes)
        assert len(walk) == shortest(start, goal, holes)
        assert len(walk) in DISTANCES
        assert len(walk) <= MOVES / 2


def test_a_goal_behind_holes_has_no_way():
    assert shortest((0, 0), (3, 3), {(0, 1), (1, 0)}) is None
    assert shortest((0, 0), (0, 0), ()) == 0


def test_the_words_are_enough_to_solve_nearly_every_map():
    """A player that reads nothing but the views and goes towards the goal, or else anywhere but back."""
    rng, won = random.Random(0), 0.0
    for seed in range(500):
        world, done, back, reward = Grid(), False, None, 0.0
        view = world.reset({"seed": seed})
        while not done:
            ways = [word.lower() for word in re.findall(r"(\w+): (?:free|goal)", view)]
            ways = [word for word in ways if word != back] or ways
            goal = re.search(r"Goal: (\d) (\w+) (\d) (\w+)", view)
            near = {goal[2]: int(goal[1]), goal[4]: int(goal[3])}
            word = max(ways, key=lambda word: (near.get(word, 0), rng.random()))
            back = {"up": "down", "down": "up", "left": "right", "right": "left"}[word]
            view, reward, done = world.step(word)
        won += reward
    assert won / 500 > 0.98
