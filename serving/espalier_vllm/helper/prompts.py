"""What is asked of an engine: tokens of prompts, and how long they must be for sequences to be level later."""

# Token ids from the fourth on: the first are often special.
FIRST_TOKEN = 3


def tokens(number, length, vocabulary):
    """Tokens that look random, and are the same for one number in every run; different numbers begin differently."""
    first = min(FIRST_TOKEN, vocabulary - 1)
    state = (number + 1) * 0x9E3779B97F4A7C15 % 2**64
    found = []
    for _ in range(length):
        # Knuth's MMIX generator; its high bits are the good ones.
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        found.append(first + (state >> 33) % (vocabulary - first))
    return found


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
