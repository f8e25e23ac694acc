"""Small functions whose heads become prompts. The bodies compute the examples in the prompts.

Each line of a docstring is one way to say what the function does. An argument's name decides which values
are drawn for it (`longspec.data.prompts.functions`).
"""

from __future__ import annotations

from itertools import pairwise


def sum_of_squares(values: list[int]) -> int:
    """Return the sum of the squares of the values.
    Add up the square of every number in the list.
    """
    return sum(value * value for value in values)


def every_kth(values: list[int], k: int) -> list[int]:
    """Keep every k-th element, beginning with the first.
    Return the elements whose index is a multiple of k.
    """
    return values[::k]


def rotate_left(values: list[int], k: int) -> list[int]:
    """Move the first k elements to the end of the list.
    Rotate the list to the left by k places.
    """
    return values[k % len(values) :] + values[: k % len(values)]


def differences(values: list[int]) -> list[int]:
    """Return by how much each value exceeds the one before it.
    Compute the difference of each pair of neighbours.
    """
    return [after - before for before, after in pairwise(values)]


def prefix_sums(values: list[int]) -> list[int]:
    """Return the sums of the first 1, 2, 3, ... values.
    For each position give the sum of everything up to it.
    """
    return [sum(values[: index + 1]) for index in range(len(values))]


def above_average(values: list[int]) -> int:
    """Count the values that are larger than the mean of all."""
    return sum(value > sum(values) / len(values) for value in values)


def second_smallest(values: list[int]) -> int | None:
    """Return the second smallest of the different values, or None when there is only one."""
    different = sorted(set(values))
    return different[1] if len(different) > 1 else None


def run_lengths(counts: list[int]) -> list[list[int]]:
    """Replace each run of equal values by the value and the length of the run.
    Encode the list as pairs of a value and how often it follows itself.
    """
    found: list[list[int]] = []
    for value in counts:
        if found and found[-1][0] == value:
            found[-1][1] += 1
        else:
            found.append([value, 1])
    return found


def smallest_mode(counts: list[int]) -> int:
    """Return the value that occurs most often; of several the smallest."""
    return min(set(counts), key=lambda value: (-counts.count(value), value))


def unique_in_order(counts: list[int]) -> list[int]:
    """Drop values that occurred before and keep the order.
    Return each value once, in the order of its first appearance.
    """
    return list(dict.fromkeys(counts))


def split_into(values: list[int], k: int) -> list[list[int]]:
    """Cut the list into pieces of k elements; the last one may be shorter."""
    return [values[begin : begin + k] for begin in range(0, len(values), k)]


def limit_values(values: list[int], n: int) -> list[int]:
    """Replace values above n by n and values below zero by zero."""
    return [min(max(value, 0), n) for value in values]


def alternating_sum(values: list[int]) -> int:
    """Add the first value, subtract the second, add the third, and so on."""
    return sum(values[::2]) - sum(values[1::2])


def position_of_max(values: list[int]) -> int:
    """Return the index of the largest value, the first one of several."""
    return values.index(max(values))


def interleave(values: list[int], counts: list[int]) -> list[int]:
    """Take elements from the two lists in turns, until the shorter one is used up."""
    return [one for pair in zip(values, counts, strict=False) for one in pair]


def weighted_sum(values: list[int], counts: list[int]) -> int:
    """Multiply values and counts at the same place and add it all up; what has no partner is ignored."""
    return sum(value * count for value, count in zip(values, counts, strict=False))


def sum_digits(n: int) -> int:
    """Return the sum of the decimal digits of n."""
    return sum(map(int, str(n)))


def all_divisors(n: int) -> list[int]:
    """Return all positive divisors of n in ascending order."""
    return [divisor for divisor in range(1, n + 1) if n % divisor == 0]


def halving_steps(n: int) -> int:
    """Count how often n must be halved (when even) or replaced by 3n + 1 (when odd) until it is 1."""
    steps = 0
    while n != 1:
        n, steps = (n // 2 if n % 2 == 0 else 3 * n + 1), steps + 1
    return steps


def triangle_number(n: int) -> int:
    """Return 1 + 2 + ... + n.
    Say how many dots are in a triangle with n rows.
    """
    return n * (n + 1) // 2


def multiples_below(n: int, k: int) -> list[int]:
    """Return the multiples of k from k up to and not including n."""
    return list(range(k, n, k))


def in_base_three(n: int) -> str:
    """Write n in base 3, without leading zeros."""
    digits = ""
    while n:
        n, digit = divmod(n, 3)
        digits = str(digit) + digits
    return digits


def words_backwards(sentence: str) -> str:
    """Return the words of the sentence in reverse order, separated by one space."""
    return " ".join(reversed(sentence.split()))


def initials(sentence: str) -> str:
    """Return the first letters of all words as one upper-case string."""
    return "".join(word[0] for word in sentence.split()).upper()


def letter_counts(text: str) -> dict[str, int]:
    """Count how often each letter occurs in the text; spaces do not count."""
    return {letter: text.count(letter) for letter in sorted(set(text.replace(" ", "")))}


def has_no_letter_twice(text: str) -> bool:
    """Return True when no letter occurs twice, whatever its case."""
    return len(set(text.lower())) == len(text)


def longest_word(sentence: str) -> str:
    """Return the longest word of the sentence, the first one of several."""
    return max(sentence.split(), key=len)


def mask_vowels(text: str, letter: str) -> str:
    """Replace every vowel of the text by the letter."""
    return "".join(letter if one in "aeiouAEIOU" else one for one in text)


def shift_letters(text: str, k: int) -> str:
    """Move each lower-case letter k places on in the alphabet, from z on to a; leave the rest."""
    return "".join(chr((ord(one) - 97 + k) % 26 + 97) if "a" <= one <= "z" else one for one in text)


def capitalised(sentence: str) -> str:
    """Make the first letter of each word a capital and the others lower case."""
    return " ".join(word.capitalize() for word in sentence.split())


def group_by_length(words: list[str]) -> dict[int, list[str]]:
    """Group the words by their length, each group in the given order."""
    lengths = sorted({len(word) for word in words})
    return {length: [word for word in words if len(word) == length] for length in lengths}


def words_with(words: list[str], letter: str) -> list[str]:
    """Return the words that contain the letter."""
    return [word for word in words if letter in word]


def sort_by_last_letter(words: list[str]) -> list[str]:
    """Sort the words by their last letter; words with the same one stay in order."""
    return sorted(words, key=lambda word: word[-1])


def columns(rows: list[list[int]]) -> list[list[int]]:
    """Swap rows and columns.
    Return the columns of the table as rows.
    """
    return [list(column) for column in zip(*rows, strict=True)]


def row_maxima(rows: list[list[int]]) -> list[int]:
    """Return the largest value of each row."""
    return [max(row) for row in rows]


def join_rows(rows: list[list[int]]) -> list[int]:
    """Join all rows into one list.
    Flatten the table, row after row.
    """
    return [value for row in rows for value in row]


def keys_and_values_swapped(scores: dict[str, int]) -> dict[int, str]:
    """Return a dictionary with keys and values swapped."""
    return {value: key for key, value in scores.items()}


def best_key(scores: dict[str, int]) -> str:
    """Return the key with the largest value."""
    return max(scores, key=scores.__getitem__)


def keys_above(scores: dict[str, int], n: int) -> list[str]:
    """Return the keys whose value is above n, in alphabetical order."""
    return sorted(key for key, value in scores.items() if value > n)


def scale_to_one(readings: list[float]) -> list[float]:
    """Divide all readings by the largest one and round them to two places."""
    return [round(reading / (max(readings) or 1), 2) for reading in readings]


def moving_average(readings: list[float]) -> list[float]:
    """Return the mean of each three neighbouring readings, rounded to two places."""
    return [round(sum(readings[at : at + 3]) / 3, 2) for at in range(len(readings) - 2)]
