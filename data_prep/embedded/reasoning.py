"""Reasoning: riddles, orders and seatings, syllogisms, analogies, decisions, what-ifs, causes, plans."""

import random
from collections.abc import Callable, Iterator

from data_prep.embedded.deck import Deck, a, items
from data_prep.embedded.maths import THINGS
from data_prep.embedded.topics import ALL_TOPICS, ANIMALS, FIRST_NAMES

RIDDLES = items(
    """
    If all roses are flowers and some flowers fade quickly, do all roses fade quickly?
    A man looks at a portrait and says: "Brothers and sisters I have none, but that man's father is my father's son." Who is in the picture?
    I have two coins that make 30 cents, and one of them is not a nickel. How is that possible?
    You have a 3-litre and a 5-litre jug. How do you measure exactly 4 litres?
    A farmer must take a wolf, a goat and a cabbage over a river in a small boat. How does he do it?
    Three switches downstairs belong to three lamps upstairs. You may go up only once. How do you find out which belongs to which?
    What weighs more, a litre of water or a litre of oil? How do you know?
    Why might a man who lives on the tenth floor take the lift only to the seventh?
    If it takes one person an hour to dig a hole, how long does it take to dig half a hole?
    A clock strikes six in five seconds. How long does it need to strike twelve?
    What can you hold in your right hand but never in your left? | Which came first, the chicken or the egg? Argue for both.
    If yesterday had been tomorrow, today would be Friday. Which day could it be?
    You are in a race and pass the person in second place. Which place are you in?
    Two doors, two guards: one always lies, one always tells the truth. Which single question finds the way out?
    Can a statement be both true and false? Think about "This sentence is false."
    How would you find the one heavier ball among nine with two weighings?
    How many piano tuners might work in a city of one million? Estimate. | Estimate how many tennis balls fit into a bus.
    How could you tell a boiled egg from a raw one without breaking it?
    A plane crashes exactly on a border. Where are the survivors buried?
    Why is it warmer in summer, although the Earth is then farther from the Sun in the north?
    My key does not turn in the lock today, but it did yesterday. List possible reasons, the most likely one first.
    The lawn is wet, but it has not rained. What explanations are there, and how would you test them?
    Every time I carry an umbrella it stays dry. Does the umbrella keep the rain away?
    """,
    "|",
)

ATTRIBUTES = items("""
    tall/taller/tallest/shortest; old/older/oldest/youngest; fast/faster/fastest/slowest; heavy/heavier/heaviest/lightest;
    rich/richer/richest/poorest; loud/louder/loudest/quietest; strong/stronger/strongest/weakest; early/earlier/earliest/latest;
    kind/kinder/kindest/least kind
    """)
CLASSES = items("""
    poets; gardeners; pilots; cooks; dancers; sailors; teachers; readers; runners; owls; robots; painters; bakers; wizards; singers;
    doctors; clerks; farmers; drummers; tailors
    """)
TRAITS = items("""
    patient; left-handed; cheerful; punctual; afraid of heights; good at cards; vegetarian; fluent in French; tidy; superstitious;
    short-sighted; fond of cheese; honest; quick to anger
    """)
OBJECT_GROUPS = items("""
    apple, pear, carrot, plum; violin, cello, trumpet, harp; Monday, March, Friday, Sunday; square, circle, cube, triangle;
    whisper, shout, walk, murmur; gold, silver, wood, iron; Nile, Danube, Everest, Rhine; shirt, coat, button, trousers; 4, 9, 15, 25;
    happy, glad, cheerful, tired; bread, milk, cheese, butter; eye, ear, nose, knee; chair, sofa, bench, table; oak, rose, birch, maple;
    run, swim, jump, sleepy; poem, novel, essay, pencil; Mars, Venus, Moon, Saturn; doctor, nurse, patient, surgeon;
    bus, tram, ferry, train; shark, dolphin, tuna, cod; red, loud, blue, green; kilometre, metre, kilogram, centimetre;
    hammer, nail, saw, drill; piano, forte, allegro, tempo
    """)
ANALOGIES = items("""
    bird : nest = dog : ?; hot : cold = early : ?; pen : write = knife : ?; teacher : school = doctor : ?; finger : hand = toe : ?;
    author : book = composer : ?; thirst : drink = hunger : ?; hour : day = month : ?; eye : see = ear : ?; seed : plant = egg : ?;
    king : crown = judge : ?; river : bridge = mountain : ?; snow : winter = leaves : ?; wheel : car = wing : ?; glove : hand = hat : ?;
    Paris : France = Rome : ?; bark : dog = roar : ?; needle : sew = spade : ?; sad : cry = happy : ?; baker : bread = tailor : ?;
    word : sentence = brick : ?; map : country = recipe : ?; key : lock = password : ?; brake : stop = engine : ?
    """)
DILEMMAS = items("""
    take a well-paid job far away or stay with friends and family; repair a ten-year-old washing machine or buy a new one;
    tell a friend that his business idea is bad; adopt a dog while living in a small flat; study what I love or what pays well;
    drive or take the train to a wedding 400 km away; spend a bonus on a trip or pay back a loan; move in with my partner after six months;
    report a colleague who comes late every day; keep a wallet that I found on the beach;
    give children pocket money or pay them for chores; eat the last slice of cake or ask around first;
    accept a friend request from my boss; let my son quit the football team; book the cheap flight with two stops or the direct one;
    sell my late aunt's piano; learn one language well or three a little; buy a house with a big garden or one near the station;
    go to a party or finish my work; change doctors; lend money to my brother; rent an extra room; go back to university at 40;
    replace the office coffee with tea; let a neighbour use my parking space; stop eating meat; switch to a smaller phone;
    have a big or a small wedding
    """)
DILEMMA_FORMS = items(
    """
    Should I {d}? Weigh the arguments and give a recommendation. | I can't decide whether to {d}. Which questions should I ask myself?
    Help me think this through: {d}. | Is it right to {d}? Argue step by step. | Make a decision table for this: {d}.
    What could go wrong if I {d}? Name three risks and how to lower them. | Play devil's advocate: {d}.
    What would a wise person say about this choice: {d}?
    """,
    "|",
)
WHAT_IFS = items("""
    there were no Moon; nobody needed to sleep; all cars drove themselves; money did not exist; people lived to 200;
    the internet stopped for a month; it rained every day for a year; plants could walk; everyone spoke the same language;
    gravity were half as strong; schools had no marks; shops were closed on three days a week; nobody could lie; all food were free;
    winters became ten degrees warmer; cats were as large as cows; the wheel had never been invented; cities banned private cars;
    everyone had to move every five years; paper did not exist; the working day had four hours; all doors looked alike;
    phones had no screens; water boiled at 60 degrees; nights were twice as long; birds could talk; nobody were allowed to own land;
    only children could vote
    """)
WHAT_IF_FORMS = items(
    """
    What would happen if {w}? | Imagine {w}. Describe the first week. | If {w}, who would gain and who would lose?
    Think it through step by step: what follows if {w}? | What would be the three biggest consequences if {w}?
    Suppose {w}. Would life be better or worse? Justify your answer.
    """,
    "|",
)
CAUSE_FORMS = items(
    """
    What are likely causes and effects of growing interest in {t}?
    Someone claims that {t} is overrated. What evidence would support or weaken that claim?
    A study says that people who know a lot about {t} are happier. Does that prove that it makes people happy?
    Give one strong and one weak argument about {t}, and explain the difference.
    What assumptions hide in the sentence "{T} will never change"? | Rank these by importance for a small town and explain: {t}, {u}, {v}.
    How are {t} and {u} connected? Find a chain of at least three steps.
    I have one hour, one sheet of paper and no internet to prepare a lesson on {t}. Plan it.
    What is missing in this argument? "{T} is popular, so it must be good." | Sort into groups and name the groups: {t}, {u}, {v}, {w}.
    Which does not fit, and why: {t}, {u}, {v}?
    How would you find out whether people in your town care about {t}? Design a small survey.
    Find a common theme of {t} and {u}, then one difference.
    """,
    "|",
)


class Reasoning:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.names, self.animals, self.things, self.topics = (
            Deck(rng, FIRST_NAMES),
            Deck(rng, ANIMALS),
            Deck(rng, THINGS),
            Deck(rng, ALL_TOPICS),
        )
        self.attributes, self.classes, self.traits = Deck(rng, ATTRIBUTES), Deck(rng, CLASSES), Deck(rng, TRAITS)
        self.groups, self.analogies = Deck(rng, OBJECT_GROUPS), Deck(rng, ANALOGIES)
        self.dilemmas, self.dilemma_forms = Deck(rng, DILEMMAS), Deck(rng, DILEMMA_FORMS)
        self.what_ifs, self.what_if_forms, self.cause_forms = Deck(rng, WHAT_IFS), Deck(rng, WHAT_IF_FORMS), Deck(rng, CAUSE_FORMS)
        self.kinds: Deck[Callable[[], str]] = Deck(
            rng,
            [
                self.order,
                self.order,
                self.syllogism,
                self.syllogism,
                self.seating,
                self.calendar,
                self.odd_one,
                self.analogy,
                self.dilemma,
                self.dilemma,
                self.dilemma,
                self.what_if,
                self.what_if,
                self.cause,
                self.cause,
                self.cause,
                self.cause,
                self.liar,
                self.plan,
                self.culprit,
                self.direction,
                self.code_word,
                self.family,
            ],
        )

    def order(self) -> str:
        _, more, most, least = self.attributes.deal().split("/")
        p = self.names.hand(self.rng.choice([3, 4, 4, 5]))
        facts = [f"{p[i]} is {more} than {p[i + 1]}" for i in range(len(p) - 1)]
        self.rng.shuffle(facts)
        ask = self.rng.choice(
            [
                f"Who is the {most}?",
                f"Who is the {least}?",
                f"Is {p[0]} {more} than {p[-1]}?",
                "Put them in order.",
                "Which two could be swapped without breaking a statement, if any?",
            ]
        )
        return ". ".join(facts) + ". " + ask + self.rng.choice(["", " Explain your reasoning.", " Think step by step."])

    def syllogism(self) -> str:
        x, y, z = self.classes.hand(3)
        t = self.traits.deal()
        premise = self.rng.choice(
            [
                f"All {x} are {y}. All {y} are {t}. Are all {x} {t}?",
                f"Some {x} are {y}. All {y} are {t}. What follows?",
                f"No {x} are {y}. Some {z} are {y}. Can we say that some {z} are not {x}?",
                f"If someone is {t}, they are among the {x}. {self.names.deal()} is one of the {x}. Must {self.names.deal()} be {t}?",
                f"All {x} are {t}. {self.names.deal()} is not {t}. Could this person belong to the {x}?",
                f"Most {x} are {t} and most {x} are {y}. Does it follow that some {y} are {t}?",
            ]
        )
        return premise + self.rng.choice(["", " Give a reason.", " Draw it in words.", " Answer yes, no or unknown, then explain."])

    def seating(self) -> str:
        p = self.names.hand(4)
        return self.rng.choice(
            [
                f"{p[0]}, {p[1]}, {p[2]} and {p[3]} sit on a bench. {p[0]} sits at the left end. {p[1]} is next to {p[0]}. {p[3]} "
                "is not at an end. Who sits where?",
                f"Four people live on floors 1 to 4. {p[0]} lives above {p[1]} but below {p[2]}. {p[3]} lives on floor 1. On which "
                "floor is everybody?",
                f"{p[0]}, {p[1]} and {p[2]} own {a(self.animals.deal())}, {a(self.animals.deal())} and {a(self.animals.deal())} (in "
                f"some order). {p[0]} is allergic to the first. {p[1]} owns the last. Who owns which animal?",
                f"In a queue, {p[0]} is directly behind {p[1]}, {p[2]} is first, and {p[3]} is not last. What is the order?",
                f"{p[0]} arrived before {p[1]}, {p[2]} after {p[3]}, and {p[3]} after {p[1]}. Who arrived last?",
            ]
        )

    def calendar(self) -> str:
        p, q = self.names.hand(2)
        d = self.rng.choice(["Monday", "Tuesday", "Wednesday", "Thursday", "Friday"])
        k, m = self.rng.randint(2, 6), self.rng.randint(2, 5)
        return self.rng.choice(
            [
                f"{p} visits the gym every {k} days and {q} every {m} days. Both were there on {d}. When do they meet there again?",
                f"If the day after tomorrow is {d}, what day was it {k} days ago?",
                f"{p}'s watch is {k * 5} minutes fast, {q}'s is {m} minutes slow. {p}'s watch shows 10:{m * 7:02d}. What does {q}'s "
                "watch show?",
                f"The meeting is two days before the {k}th workday after {d}. On which day of the week is it?",
            ]
        )

    def odd_one(self) -> str:
        g = self.groups.deal()
        return self.rng.choice(
            [
                f"Which one does not belong: {g}?",
                f"Find the odd one out and explain: {g}.",
                f"{g}: which word is different? Is there more than one possible answer?",
                f"What do most of these have in common, and which is the exception? {g}",
            ]
        )

    def analogy(self) -> str:
        x = self.analogies.deal()
        return self.rng.choice(
            [
                f"Complete: {x}",
                f"{x} Explain the relation.",
                f"Solve the analogy {x} and make up a similar one.",
                f"Complete the analogy and say why: {x}",
            ]
        )

    def dilemma(self) -> str:
        return self.dilemma_forms.deal().format(d=self.dilemmas.deal())

    def what_if(self) -> str:
        return self.what_if_forms.deal().format(w=self.what_ifs.deal())

    def cause(self) -> str:
        t, u, v, w = self.topics.hand(4)
        return self.cause_forms.deal().format(t=t, T=t[0].upper() + t[1:], u=u, v=v, w=w)

    def liar(self) -> str:
        p, q, r = self.names.hand(3)
        return self.rng.choice(
            [
                f'{p} says: "{q} is lying." {q} says: "{r} is lying." {r} says: "Both of them are lying." Who tells the truth?',
                f'On an island, knights always tell the truth and knaves always lie. {p} says: "{q} and I are of the same kind." '
                f"What is {q}?",
                f"Exactly one of {p}, {q} and {r} ate the cake. {p} says it was {q}. {q} says it was someone else. {r} says nothing "
                "true. Who did it?",
            ]
        )

    def plan(self) -> str:
        p, k = self.names.deal(), self.rng.randint(3, 9)
        return self.rng.choice(
            [
                f"{p} has to cook {k} pancakes with a pan that holds two, one minute a side. What is the shortest time?",
                f"Plan the morning of {p}: shower {k + 5} minutes, breakfast 15, dog walk 20, bus at 8:{k * 5:02d}. When must the "
                "alarm ring at the latest? Can anything overlap?",
                f"{k} tasks must be shared by two people. Task lengths in hours: "
                f"{', '.join(str(self.rng.randint(1, 8)) for _ in range(k))}. Find a fair split.",
                f"{p} packs {k + 2} {self.things.deal()}, each of {self.rng.randint(2, 5)} kg, into bags that carry "
                f"{self.rng.randint(8, 14)} kg. How many bags are needed, and could another way of packing do with fewer?",
            ]
        )

    def culprit(self) -> str:
        p = self.names.hand(4)
        place = self.rng.choice(["kitchen", "garage", "library", "garden", "office", "cellar"])
        obj = self.rng.choice(["a silver spoon", "the last biscuit", "a set of keys", "the red umbrella", "a painting", "the cash box"])
        return (
            f"{obj[0].upper() + obj[1:]} vanished from the {place} between {self.rng.randint(2, 4)} and {self.rng.randint(5, 7)} "
            f"pm. {p[0]} was at the cinema with {p[1]}. {p[2]} has no key. {p[3]} was alone at home. "
            + self.rng.choice(
                [
                    "Who is the most likely suspect, and what would you check?",
                    "Which facts matter and which do not?",
                    "Write down what can be concluded with certainty.",
                    "What would you ask each of them?",
                ]
            )
        )

    def direction(self) -> str:
        k, m = self.rng.randint(2, 9), self.rng.randint(2, 9)
        return self.rng.choice(
            [
                f"{self.names.deal()} walks {k} km north, {m} km east and {k} km south. How far from the start, and in which direction?",
                f"I face {self.rng.choice(['north', 'west', 'south-east'])}, turn right {k} times by 90 degrees and then left {m} "
                "times. Where do I look?",
                f"A robot goes {k} steps forward, turns left, goes {m} steps, turns left and goes {k} steps. Where is it now, "
                "compared with the start?",
            ]
        )

    def code_word(self) -> str:
        word = self.rng.choice(
            items("garden; window; silver; planet; butter; castle; monkey; forest; bridge; summer; pencil; cheese; rocket; turtle; basket")
        )
        shift = self.rng.randint(1, 5)
        coded = "".join(chr((ord(c) - 97 + shift) % 26 + 97) for c in word)
        return self.rng.choice(
            [
                f'If each letter is moved {shift} places forward in the alphabet, what does "{word}" become?',
                f'Decode "{coded}": every letter was moved {shift} places forward.',
                f'Write "{word}" backwards, then count its vowels.',
                f'How many different letters does "{word}" have? Which other words can be made of them?',
                f'In a code, "cat" is written as 3-1-20. How is "{word}" written?',
            ]
        )

    def family(self) -> str:
        p, q, r = self.names.hand(3)
        return self.rng.choice(
            [
                f"{p} is a parent of {q}, and {q} is a brother or sister of {r}. How are {p} and {r} related?",
                f"{p}'s father is the only son of {q}'s grandfather. How might {p} and {q} be related?",
                f"{p} has three brothers, and each brother has two sisters. How many children does the family have? {p} is one of "
                "the girls.",
                f"{q} is married to {r}, a cousin of {p}. What is {q} to {p}, and what is {p}'s daughter to {r}?",
            ]
        )


def reasoning_prompts(rng: random.Random) -> Iterator[str]:
    reasoning = Reasoning(rng)
    yield from RIDDLES
    while True:
        yield reasoning.kinds.deal()()
