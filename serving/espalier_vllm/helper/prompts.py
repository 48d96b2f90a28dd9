"""What is asked of an engine: tokens of prompts, and how long they must be for sequences to be level later."""

# Token ids from the fourth on: the first are often special.
FIRST_TOKEN = 3
# Prompts of one length before they repeat.
DIFFERENT = 4096


class Prompts:
    """Tokens that look random, the same in every run: windows of one list, since time passes while they are taken."""

    def __init__(self, vocabulary, longest):
        first = min(FIRST_TOKEN, vocabulary - 1)
        # Knuth's MMIX generator; its high bits are the good ones.
        state, self.tokens = 1, []
        for _ in range(longest + DIFFERENT):
            state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
            self.tokens.append(first + (state >> 33) % (vocabulary - first))

    def take(self, number, length):
        start = number % DIFFERENT
        return self.tokens[start : start + length]


def level_lengths(sequences, length, budget):
    """Prompt lengths with which all sequences stand at `length` tokens in the step in which the last one begins.

    A step takes at most `budget` tokens, sequences that run first, one each, then prompts in order, cut where they do
    not fit. So early ones run ahead by a token a step, and get shorter prompts for it: at least one token.
    """
    lengths = [length] * sequences
    # Shorter prompts begin sooner, which changes who is ahead: this settles in two or three rounds.
    for _ in range(4):
        begun = begin_steps(lengths, budget)
        level = [max(1, length - (begun[-1] - step)) for step in begun]
        if level == lengths:
            break
        lengths = level
    return lengths


def begin_steps(lengths, budget):
    """The step, from 0, in which each prompt is complete and its first token comes."""
    begun = []
    step = 0
    left = budget
    for length in lengths:
        while length > 0:
            if left <= 0:
                step += 1
                left = budget - len(begun)
                # Sequences that run leave no room for prompts: vLLM would wait for them to end.
                if left <= 0:
                    raise ValueError(f"{len(begun)} sequences that run fill a step of {budget} tokens")
            taken = min(length, left)
            length -= taken
            left -= taken
        begun.append(step)
    return begun
