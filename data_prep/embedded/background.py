"""What people say around a question: greetings, reasons, moods. Some prompts get one, so that not all start with the task."""

import random

from data_prep.embedded.deck import Deck, items
from data_prep.embedded.topics import CITIES, COUNTRIES, FIRST_NAMES

BEFORE = items(
    """
    Hi there! | Hello, I hope you can help me. | Good morning. | hey | Hi, {n} here. | I am new to this, so please bear with me.
    Quick one: | I've been thinking about this all day. | My teacher gave us this task.
    I'm 34, I work as a night porter in {c}, and in the quiet hours I like to learn things.
    I'm preparing a small exhibition in {c} and have to get the text right. | English is not my first language; I grew up in {o}.
    My daughter {n} is nine and asks questions that I cannot answer. Today's was this one.
    We have a bet at the office, and {n} is sure that I will lose. | I tried two other websites and got two different answers.
    I am sitting on a slow train to {c} and have nothing to read. | I'm writing a quiz for my club's Christmas party.
    Last week I had a long talk with my neighbour from {o}, and we could not agree.
    I'm a retired electrician and finally have time for things I never learned at school.
    I run a small hotel near {c} with eleven rooms. | For my evening class I need something that can be read out in two minutes.
    Please act as a careful assistant: if you are not sure, say so. | You are a helpful assistant who likes clear examples.
    You are an expert with thirty years of experience and little patience for nonsense.
    I only have my phone with me, so no long lines, please. | I have asked this before and the answer was too long.
    It's late, I'm tired, and this is due tomorrow. | We're a group of four students from {c}. | I'm home with the flu and bored.
    I teach a class of adults, most of whom left school at fifteen. | Thanks for your help yesterday! Here is the next one.
    Don't laugh, but I have never understood this. | My grandmother in {o} used to say that there are no stupid questions.
    I'm making a podcast with my friend {n}. | For a board game that I am designing, I need the following.
    I have a meeting in ten minutes.
    """,
    "|",
)
AFTER = items(
    """
    Thanks! | Thank you in advance. | Please. | I need it by tonight. | Be honest. | If something is unclear, ask me first.
    My friend {n} will read it too. | I live in {c}, in case that matters. | You may be funny. | Surprise me! | Please avoid clichés.
    Write it so that I can print it on one page. | And please don't start with "Sure". | Use headings. | I know the basics already.
    Mention one thing that most people forget. | Put the most important word in bold. | First make a plan, then write the answer.
    Give me two alternatives to choose from. | Please write in British spelling. | Finish with a short summary. | It is for people in {o}.
    No lists, please, only full sentences. | Say how sure you are.
    """,
    "|",
)


class Background:
    """Puts a line about the person before or after some of the prompts."""

    def __init__(self, rng: random.Random, share: float) -> None:
        self.rng, self.share = rng, share
        self.before, self.after = Deck(rng, BEFORE), Deck(rng, AFTER)
        self.names, self.cities, self.countries = Deck(rng, FIRST_NAMES), Deck(rng, CITIES), Deck(rng, COUNTRIES)

    def around(self, text: str) -> str:
        roll = self.rng.random()
        if roll >= self.share:
            return text
        first = roll < self.share * 0.6
        extra = (self.before if first else self.after).deal()
        extra = extra.format(n=self.names.deal(), c=self.cities.deal(), o=self.countries.deal())
        gap = "\n\n" if len(text) > 160 or self.rng.random() < 0.2 else " "
        return f"{extra}{gap}{text}" if first else f"{text}{gap}{extra}"
