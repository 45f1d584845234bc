"""Short texts full of facts (notices, orders, mails, logs, tables), put together at random, with questions that ask for those facts."""

import random
from collections.abc import Callable, Iterator

from data_prep.embedded.deck import Deck, items
from data_prep.embedded.passages import PASSAGE_QUESTIONS, PASSAGES, REWRITE_SENTENCE, REWRITE_TEXT, SENTENCES
from data_prep.embedded.topics import ALL_TOPICS, CITIES, FIRST_NAMES, FOODS, SURNAMES

DAYS = items("Monday; Tuesday; Wednesday; Thursday; Friday; Saturday; Sunday")
MONTHS = items("January; February; March; April; May; June; July; August; September; October; November; December")
EVENTS = items("""
    pottery workshop; jazz night; repair café; flea market; open day; board game evening; night walk; poetry reading; science fair;
    wine tasting; swimming gala; plant swap; model railway show; cooking class; film club; first-aid course; street party; bird walk;
    dance evening; charity run
    """)
VENUES = items("""
    the town hall; the old brewery; Mill Lane library; the school gym; St Anne's church hall; the riverside café; Studio 9;
    the botanical garden; the youth centre; the ferry terminal; room B12; the community kitchen; the market square; the fire station;
    the museum courtyard
    """)
BRING = items("""
    an apron; sturdy shoes; a torch; your own cup; a notebook; something to share; a towel; a warm jacket; an old T-shirt;
    a musical instrument; a photo of your garden; scissors; a pillow; a bicycle pump
    """)
GOODS = items("""
    desk lamp; wool blanket; garden hose; paper shredder; rain jacket; tea set; bicycle helmet; yoga mat; bookcase; coffee grinder;
    alarm clock; picture frame; electric drill; tent; suitcase; frying pan; office chair; backpack; radio; pair of curtains; toolbox;
    floor mat; bird feeder; keyboard
    """)
COLOURS = items("red; navy blue; light grey; dark green; white; black; mustard yellow; pink; beige; turquoise; brown; violet")
FIRMS = items("""
    Nordlicht Supplies; Bramble & Sons; Quickfix Ltd; Alder Office; Pinewood Traders; Lumen House; Kestrel Logistics; Tidy Home;
    Harrow Print; Cobalt Tools; Maple Street Books; Fennel Foods; Orbit Travel; Rowan Clinic; Stonebridge Motors; Vela Software
    """)
JOBS = items("""
    baker; night porter; web developer; physiotherapist; bus driver; laboratory assistant; primary school teacher; electrician;
    head gardener; translator; accountant; florist; dental nurse; warehouse manager; data analyst; chef; sound engineer; lifeguard; tailor;
    project manager
    """)
HOBBIES = items("""
    long walks; repairing clocks; baking; choir singing; table tennis; watching birds; old films; painting; kayaking; growing chillies;
    crosswords; the trumpet; rock climbing; knitting; astronomy
    """)
SYMPTOMS = items("""
    a sore throat; a stiff neck; a mild fever; a rash on the left arm; an upset stomach; a swollen ankle; a dry cough;
    ringing in the right ear; a headache behind the eyes; a burning feeling in the chest
    """)
SERVICES = items("auth; billing; search; mailer; backup; gateway; inventory; scheduler; reports; images")
LOG_TEXTS = items("""
    connection refused by host db{n}; request took {n} ms; user {n} logged in; disk usage at {n} percent; retry {n} of 1000;
    file part-{n}.tmp not found; {n} records written; cache cleared ({n} entries); certificate expires in {n} days; worker {n} restarted
    """)

Facts = tuple[str, list[str]]  # a text, and questions that it answers


class Notices:
    """Draws the pieces of the texts from decks, so that names, places and goods are spread evenly."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        lists = {
            "day": DAYS,
            "month": MONTHS,
            "event": EVENTS,
            "venue": VENUES,
            "bring": BRING,
            "goods": GOODS,
            "colour": COLOURS,
            "firm": FIRMS,
            "job": JOBS,
            "hobby": HOBBIES,
            "symptom": SYMPTOMS,
            "service": SERVICES,
            "log": LOG_TEXTS,
            "first": FIRST_NAMES,
            "last": SURNAMES,
            "city": CITIES,
            "food": FOODS,
            "topic": ALL_TOPICS,
        }
        self.decks = {name: Deck(rng, values) for name, values in lists.items()}
        self.kinds: Deck[Callable[[], Facts]] = Deck(
            rng,
            [
                self.event,
                self.order,
                self.booking,
                self.profile,
                self.mail,
                self.log,
                self.table,
                self.advert,
                self.minutes,
                self.recipe,
                self.clinic,
                self.timetable,
                self.rental,
                self.phone_note,
                self.race,
                self.library,
                self.weather,
                self.contract,
            ],
        )

    def g(self, name: str) -> str:
        return self.decks[name].deal()

    def person(self) -> str:
        return f"{self.g('first')} {self.g('last')}"

    def date(self) -> str:
        return f"{self.rng.randint(1, 28)} {self.g('month')}"

    def clock(self) -> str:
        return f"{self.rng.randint(7, 21)}:{self.rng.choice(['00', '15', '30', '45'])}"

    def n(self, low: int, high: int) -> int:
        return self.rng.randint(low, high)

    def event(self) -> Facts:
        e, v = self.g("event"), self.g("venue")
        text = self.rng.choice(
            [
                f"On {self.g('day')}, {self.date()}, the {e} takes place at {v}. Doors open at {self.clock()}. Tickets cost "
                f"{self.n(3, 28)} euros, children pay half. Please bring {self.g('bring')}. "
                f"To register, call {self.person()} before {self.date()}.",
                f"{e.upper()}! Join {self.person()} and {self.person()} at {v} on {self.date()}, {self.clock()} to late. Only "
                f"{self.n(12, 90)} places. Entry is free, but we are glad of donations. "
                f"What to bring: {self.g('bring')} and {self.g('bring')}.",
                f"Because of the weather, the {e} has been moved from {v} to {self.g('venue')}. It now starts at {self.clock()} on "
                f"{self.g('day')}. Questions go to {self.person()}, who also keeps the list of the {self.n(9, 70)} people taking part.",
            ]
        )
        return text, [
            "When and where does the event take place?",
            "What should visitors bring?",
            "List all names, dates and times.",
            "Who is the contact person?",
            "Extract event, place, date and time as JSON.",
            "What does it cost to take part, if that is stated?",
        ]

    def order(self) -> Facts:
        lines = "\n".join(
            f"- {self.n(1, 12)} x {self.g('goods')} ({self.g('colour')}), {self.n(4, 160)}.{self.rng.choice(['00', '50', '90'])}"
            for _ in range(self.n(2, 4))
        )
        text = (
            f"Order no. {self.n(10000, 99999)}\nCustomer: {self.person()}, {self.g('city')}\n"
            f"{lines}\nDelivery by {self.g('firm')} on {self.date()}, paid by {self.rng.choice(['card', 'invoice', 'bank transfer'])}."
        )
        return text, [
            "Which articles were ordered, and how many of each?",
            "What is the order number and who is the customer?",
            "Turn the order into a table.",
            "Which item is the most expensive?",
            "List only the colours.",
            "How and when is it delivered?",
            "Return the items as a JSON list.",
        ]

    def booking(self) -> Facts:
        a, b = self.decks["city"].hand(2)
        text = (
            f"Dear {self.g('first')}, your trip with {self.g('firm')} is confirmed. You leave {a} on {self.date()} at "
            f"{self.clock()} from platform {self.n(1, 14)} and reach {b} at {self.clock()}. "
            f"Your seat is {self.n(1, 90)}{self.rng.choice('ABCD')} in coach {self.n(1, 12)}. The return ticket is valid until "
            f"{self.date()}. Changes cost {self.n(5, 30)} euros."
        )
        return text, [
            "From where to where does the trip go, and when?",
            "Extract seat, coach and platform.",
            "What does a change cost?",
            "List all times and dates in order.",
            "Write the trip details as a short list.",
        ]

    def profile(self) -> Facts:
        text = (
            f"{self.person()} was born in {self.g('city')} in {self.n(1938, 1999)} and trained as a {self.g('job')}. After "
            f"{self.n(2, 15)} years in {self.g('city')}, the family moved to {self.g('city')}, where "
            f"the {self.rng.choice(['second', 'third', 'only'])} child was born. Today the former {self.g('job')} gives talks about "
            f"{self.g('topic')} and loves {self.g('hobby')}."
        )
        return text, [
            "Which cities are mentioned, and in what role?",
            "List the jobs in the order in which they appear.",
            "What do we learn about hobbies and interests?",
            "Give name, year of birth and place of birth.",
            "Put the stations of this life into a timeline.",
            "What is the topic of the talks?",
        ]

    def mail(self) -> Facts:
        p, q = self.person(), self.g("first")
        text = (
            f"From: {p}\nTo: {q}\nSubject: {self.g('goods')} and other things\n\nHi {q}, the {self.g('colour')} {self.g('goods')} "
            f"arrived on {self.g('day')}, but the {self.g('goods')} is still missing. Could you ask {self.g('firm')} about it "
            f"before {self.clock()} tomorrow? Also, {self.g('first')} needs the report on {self.g('topic')} by {self.date()}, and "
            f"the room for {self.n(5, 40)} people has not been booked. Thanks!"
        )
        return text, [
            "List all tasks that the receiver has to do.",
            "Which item has arrived and which is missing?",
            "What are the deadlines?",
            "Who wants what? Make a list.",
            "Summarise the mail in one line and list the open points.",
            "Extract all names of people and companies.",
        ]

    def log(self) -> Facts:
        lines = []
        minute = self.n(0, 20)
        for _ in range(self.n(4, 7)):
            minute += self.n(1, 5)
            lines.append(
                f"{self.n(8, 9):02d}:{minute:02d}:{self.n(0, 59):02d} {self.rng.choice(['INFO', 'WARN', 'ERROR'])} "
                f"{self.g('service')}: {self.g('log').format(n=self.n(2, 990))}"
            )
        return "\n".join(lines), [
            "Which lines are errors? If there are none, say so.",
            "List the services that appear in this log.",
            "How many lines have the level WARN?",
            "What happened first and what happened last?",
            "Extract time, level and service of each line as CSV.",
            "What would you look at first if you had to fix this system?",
        ]

    def table(self) -> Facts:
        rows = "\n".join(f"{self.g('first')},{self.n(18, 70)},{self.g('city')},{self.g('job')}" for _ in range(self.n(4, 6)))
        return f"name,age,city,job\n{rows}", [
            "Who is the oldest person?",
            "List everybody younger than 40.",
            "Which cities occur?",
            "Convert this CSV to a Markdown table.",
            "Sort the people by age.",
            "What is the job of the second person?",
            "Write one sentence about each person.",
            "Give me only the names, separated by commas.",
        ]

    def advert(self) -> Facts:
        text = (
            f"{self.g('firm')} in {self.g('city')} is looking for a {self.g('job')} "
            f"({self.rng.choice(['full time', 'part time', '20 hours a week'])}) from {self.date()}. We offer {self.n(24, 33)} days "
            "of holiday, "
            f"a salary of {self.n(24, 68)},000 a year and "
            f"{self.rng.choice(['free lunch', 'a company bicycle', 'a language course', 'flexible hours'])}. You should have "
            f"{self.n(2, 6)} years of experience and enjoy working with people. "
            f"Send your application to {self.person()} by {self.date()}."
        )
        return text, [
            "What does the company offer?",
            "What are the requirements?",
            "When is the deadline and when does the job start?",
            "Extract job title, place, salary and contact.",
            "Would this job suit someone without experience?",
            "List the facts of this advert in key: value form.",
        ]

    def minutes(self) -> Facts:
        p, q, r = self.person(), self.person(), self.person()
        text = (
            f"Minutes, {self.date()}. Present: {p}, {q}, {r}. 1. {p} reports that {self.n(40, 900)} people took part in the "
            f"{self.g('event')}. 2. {q} will buy a new {self.g('goods')} for at most {self.n(50, 800)} euros. "
            f"3. The {self.g('event')} is moved to {self.date()}. 4. {r} asks for ideas about {self.g('topic')}; everyone sends two "
            f"by {self.g('day')}."
        )
        return text, [
            "Who has to do what, and by when?",
            "List the decisions.",
            "Who was present?",
            "What is the budget and what is it for?",
            "Which point is about a change of date?",
            "Make a to-do list from these minutes.",
        ]

    def recipe(self) -> Facts:
        f = self.decks["food"].hand(4)
        text = (
            f"Take {self.n(100, 800)} g of {f[0]}, {self.n(50, 300)} g of {f[1]}, a little {f[2]} and {self.n(1, 6)} spoons of "
            f"{f[3]}. Heat the oven to {self.n(15, 23)}0 degrees. Mix everything in a {self.g('colour')} bowl, leave it for "
            f"{self.n(5, 60)} minutes "
            f"and bake it for {self.n(15, 75)} minutes. Serves {self.n(2, 8)}. {self.g('first')} likes it cold, with lemon."
        )
        return text, [
            "List the ingredients with their amounts.",
            "How long does it take in all?",
            "Write the steps as a numbered list.",
            "How hot must the oven be and how many people does it serve?",
            "Double all amounts.",
            "Make a shopping list.",
        ]

    def clinic(self) -> Facts:
        text = (
            f"Patient, {self.n(19, 88)}, {self.g('job')}, has had {self.g('symptom')} and {self.g('symptom')} for {self.n(2, 12)} "
            f"days. No known allergies{self.rng.choice(['', ' except to nuts', ' except to penicillin'])}. Temperature "
            f"{self.n(364, 392) / 10}. "
            f"Takes {self.n(1, 3)} tablets a day against high blood pressure. Advised rest and plenty of fluids; check again on "
            f"{self.date()}."
        )
        return text, [
            "Which symptoms are described and for how long?",
            "Is there an allergy?",
            "When is the next check?",
            "Fill in: age, job, symptoms, temperature, advice.",
            "Write the note as bullet points.",
        ]

    def timetable(self) -> Facts:
        rows = "\n".join(
            f"{self.clock()}  {city}  (bay {self.n(1, 9)}{self.rng.choice(['', ', delayed', ', not on Sundays'])})"
            for city in self.decks["city"].hand(self.n(4, 6))
        )
        return f"Buses from the central station:\n{rows}", [
            "Which bus leaves first?",
            "Which buses are delayed?",
            "List destinations and bays only.",
            "Sort the buses by time.",
            "Which of these buses does not run every day?",
            "Turn this into full sentences.",
        ]

    def rental(self) -> Facts:
        text = (
            f"To let from {self.date()}: {self.n(1, 5)}-room flat in {self.g('city')}, {self.n(28, 140)} square metres, "
            f"{self.rng.choice(['ground', 'second', 'fourth', 'top'])} floor, "
            f"{self.rng.choice(['balcony', 'small garden', 'no lift', 'shared laundry'])}. "
            f"Rent {self.n(380, 1900)} a month plus {self.n(60, 240)} for heating. "
            f"{self.rng.choice(['No pets.', 'Cats welcome.', 'Non-smokers only.'])} Viewing on {self.g('day')} at {self.clock()} "
            f"with {self.person()}."
        )
        return text, [
            "How much is the rent with heating?",
            "List size, rooms, floor and price.",
            "When can I see the flat, and whom do I meet?",
            "Are pets allowed?",
            "Extract everything a student would want to know before calling.",
            "Write the advert as key-value pairs.",
        ]

    def phone_note(self) -> Facts:
        text = (
            f"Phone note: {self.person()} of {self.g('firm')} called at {self.clock()}. The {self.n(3, 60)} {self.g('colour')} "
            f"{self.g('goods')}s can't be delivered before {self.date()}. As a replacement they offer a {self.g('goods')} at "
            f"{self.n(5, 30)} percent off. "
            f"Please call back by {self.g('day')}; extension {self.n(100, 999)}."
        )
        return text, [
            "Who called and from which company?",
            "What is the problem and what is offered instead?",
            "What has to be done, and by when?",
            "Extract all numbers with their meaning.",
            "Shorten the note to one line.",
        ]

    def race(self) -> Facts:
        minutes = sorted(self.rng.sample(range(31, 60), 5))
        rows = "\n".join(f"{i}. {self.person()} ({self.g('city')}) {m}:{self.n(10, 59)}" for i, m in enumerate(minutes, 1))
        return f"Results of the 10 km run, {self.n(60, 400)} runners, {self.n(4, 29)} degrees:\n{rows}", [
            "Who came third?",
            "Which cities do the runners come from?",
            "List names only.",
            "What was the weather like and how many people took part?",
            "Write a two-sentence report about the race.",
            "Convert the results to JSON.",
        ]

    def library(self) -> Facts:
        text = (
            f"Dear reader, the book about {self.g('topic')} was due on {self.date()}. The fee is now "
            f"{self.n(1, 9)}.{self.n(1, 9)}0. Your book about {self.g('topic')} can be kept until {self.date()}, and the one about "
            f"{self.g('topic')} is ready at {self.g('venue')}. "
            f"We are closed on {self.g('day')}s. {self.person()}"
        )
        return text, [
            "Which books are mentioned, and what is the state of each?",
            "How high is the fee and why is it due?",
            "On which day is the library closed?",
            "List all dates.",
            "What should the reader do next?",
        ]

    def weather(self) -> Facts:
        c = self.decks["city"].hand(3)
        text = (
            f"{c[0]} starts with fog and {self.n(-4, 12)} degrees, later {self.n(13, 24)}. In {c[1]} {self.n(4, 40)} mm of rain "
            f"fall before noon, and the wind reaches {self.n(30, 95)} km/h. {c[2]} stays dry until {self.g('day')}; "
            f"after that, expect {self.rng.choice(['snow', 'thunderstorms', 'hail', 'sunshine', 'light showers'])}. The outlook for "
            f"{self.g('month')} is {self.rng.choice(['mild', 'cold', 'unsettled', 'unusually warm'])}."
        )
        return text, [
            "What is the weather in each city?",
            "Where is it windy?",
            "Extract all temperatures.",
            "Which city should I visit if I hate rain?",
            "Make a table: city, weather, numbers.",
            "What is the long-term outlook?",
        ]

    def contract(self) -> Facts:
        text = (
            f"{self.g('firm')} (the seller) sells one used {self.g('goods')}, {self.g('colour')}, to {self.person()} (the buyer) "
            f"for {self.n(20, 900)} euros. One half is paid at once, the rest by {self.date()}. The seller knows of one fault: "
            f"{self.rng.choice(['a scratch on the back', 'a missing screw', 'a loose cable', 'faded paint'])}. Returns are possible "
            f"for {self.n(7, 30)} days. Signed in {self.g('city')}, {self.date()}."
        )
        return text, [
            "Who are the two parties?",
            "What is sold, and for how much?",
            "Which fault is mentioned?",
            "What are the payment terms?",
            "List all duties of the buyer.",
            "Explain the contract in two simple sentences and list its dates.",
        ]


PAIR_QUESTIONS = items(
    """
    Which names or places appear in text A and which in text B? | What are the two texts about? One sentence each.
    Which of the texts gives more numbers? List them for both. | Make one table with the main facts of both texts.
    Extract all dates and times from A and B, and say which text each is from. | Do the two texts have anything in common?
    Which text is more urgent for the reader, and why? | List the people or companies in both texts.
    Give each text a label of one or two words, then quote the words that made you choose it. | What does A tell that B does not?
    Write one question that only text A can answer and one that only B can answer.
    """,
    "|",
)

# [] stands for a line break.
LAYOUTS = items(
    """
    {q}[][]{x} | {x}[][]{q} | Read the text and answer the question.[][]Text: {x}[][]Question: {q} | {q} Use only the text below.[][]"{x}"
    Here is some text:[]---[]{x}[]---[]{q} | Text:[]{x}[][]Task: {q} | {q}[]<text>[]{x}[]</text> | I got this today:[][]{x}[][]{q}
    Please help me with this. {q}[][]{x} | {x}[][]From the text above: {q} | INPUT[]{x}[][]INSTRUCTION[]{q}
    {q} If the text does not say it, answer "not stated".[][]{x}
    """,
    "|",
)


def extraction_prompts(rng: random.Random) -> Iterator[str]:
    notices, layouts = Notices(rng), Deck(rng, LAYOUTS)
    passages, questions, pair_questions = Deck(rng, PASSAGES), Deck(rng, PASSAGE_QUESTIONS), Deck(rng, PAIR_QUESTIONS)
    while True:
        roll = rng.random()
        if roll < 0.1:
            text, question = f"Text A: {notices.kinds.deal()()[0]}\n\nText B: {notices.kinds.deal()()[0]}", pair_questions.deal()
        elif roll < 0.14:
            text, question = f"Text A: {passages.deal()}\n\nText B: {passages.deal()}", pair_questions.deal()
        elif roll < 0.82:
            text, asked = notices.kinds.deal()()
            question = rng.choice(asked)
        else:
            text, question = passages.deal(), questions.deal()
        yield layouts.deal().replace("[]", "\n").format(q=question, x=text)


def rewriting_prompts(rng: random.Random) -> Iterator[str]:
    """Whole passages, single sentences, and the fact-filled notices, each with a wish how to rewrite them."""
    notices, passages, sentences = Notices(rng), Deck(rng, PASSAGES), Deck(rng, SENTENCES)
    on_text, on_sentence = Deck(rng, REWRITE_TEXT), Deck(rng, REWRITE_SENTENCE)
    prose = Deck(
        rng,
        [
            notices.event,
            notices.booking,
            notices.profile,
            notices.mail,
            notices.advert,
            notices.minutes,
            notices.rental,
            notices.phone_note,
            notices.library,
            notices.weather,
            notices.contract,
        ],
    )
    while True:
        roll = rng.random()
        if roll < 0.38:
            yield on_sentence.deal().format(s=sentences.deal())
            continue
        text = passages.deal() if roll < 0.7 else prose.deal()()[0]
        wish = on_text.deal()
        # People put the wish before or after the text.
        yield f"{wish}\n\n{text}" if rng.random() < 0.75 else f"{text}\n\n{wish.rstrip(':')}."
