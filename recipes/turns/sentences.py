"""Episodes of three sentences with one opening, for whose classes together one reward is paid at the end."""

from functools import cache

from tokencredit.text.rewards.reward_models import Classifier, load

SENTENCES = 3


class Sentences:
    """Each turn is a sentence, and the observation is the opening of the next."""

    def reset(self, row):
        """Begin with the row's prompt as the opening."""
        self.opening, self.written = row["prompt"], []
        return self.opening

    def step(self, completion):
        """Keep a sentence, and ask for the next."""
        self.written.append(completion)
        done = len(self.written) == SENTENCES
        return "" if done else f"\n{self.opening}", 0.0, done


@cache
def reader(classifier, label):
    """Load a classifier once."""
    return Classifier(classifier, *load(classifier, "cpu"), label)


def all_sentences(environments, classifier, label):
    """The sum of the classifier's scores of an episode's sentences, each read by itself."""
    openings = [world.opening for world in environments for _ in world.written]
    scores = iter(reader(classifier, label)(openings, [text for world in environments for text in world.written]))
    return [sum(next(scores) for _ in world.written) for world in environments]
