"""Creative and practical writing, and role play."""

import random
from collections.abc import Iterator

from data_prep.embedded.deck import Deck, a, items
from data_prep.embedded.topics import ALL_TOPICS, ANIMALS, CITIES, FIRST_NAMES

FORMS = items("""
    haiku; limerick; four-line poem; free-verse poem; sonnet; nursery rhyme; song chorus; short story; very short story of about 100 words;
    fable with a moral; fairy tale; ghost story; diary entry; letter to a friend; love letter; postcard text; blog post introduction;
    newspaper headline with a short lead; opinion column; letter to the editor; product description; radio advertisement; slogan;
    social media post; tweet-length joke; stand-up comedy bit; wedding toast; farewell speech; graduation speech opening;
    motivational speech; bedtime story; dialogue between two strangers; monologue; scene for a play; film pitch; book review;
    restaurant review; museum label; travel brochure paragraph; podcast introduction; news report; press release;
    interview with three questions and answers; set of instructions; encyclopedia entry; riddle; acrostic; birthday card; thank-you note;
    list of five proverbs; essay outline; persuasive essay; argument for and against; five-sentence paragraph; first paragraph of a novel;
    last paragraph of a novel; recipe written as a poem; weather forecast; sports commentary; advice column answer; fictional chat log;
    letter from the year 2150; message in a bottle; campfire tale; parody of a legal notice; mission statement;
    crossword clues with answers; school report
    """)

WRITE_ABOUT = items(
    """
    Write {f} about {t}. | Write me {f} on the subject of {t}. | Please compose {f} about {t}. | I need {f} about {t} for my class.
    Could you draft {f} that deals with {t}? | Create {f} inspired by {t}. | {F} about {t}, please.
    Try your hand at {f} in which {t} plays a part. | Give me {f} about {t}, written from the point of view of {w}.
    Write {f} about {t} in a {m} tone. | In a {m} voice, write {f} about {t}. | Write {f} that connects {t} with {u}.
    Come up with {f} about {t} and give it a title. | write {f} on {t} for {r} | Let's be creative: {f} about {t}, set in {c}.
    Produce two different versions of {f} about {t}. | For our newsletter we want {f} about {t}. The readers are {r}.
    Write {f} about {t}. It must contain the words "{k}" and "{l}". | Write {f} about {t} that ends with the line: "{e}"
    """,
    "|",
)

TONES = items("""
    cheerful; gloomy; sarcastic; formal; warm; mysterious; dry; nostalgic; excited; calm; dramatic; humble; poetic; matter-of-fact;
    playful; angry but polite; hopeful; solemn; childlike; old-fashioned; ironic; tender; tense; conversational
    """)
VIEWS = items("""
    a tired nurse; a lost tourist; an old tree; a street cat; a robot on its first day; a grandmother of nine; a nervous student;
    a taxi driver; the Moon; a retired teacher; a house that is for sale; an honest thief; a baker at four in the morning;
    a sceptical child; a ship's cook; the last customer of the day
    """)
READERS = items("""
    busy parents; young children; people who hate reading; new employees; gardeners; music students; pensioners; football fans; scientists;
    hotel guests; people on a diet; first-time voters; cat owners; amateur cooks; volunteers; engineers; members of a choir
    """)
WORDS = items("""
    amber; bucket; whisper; ladder; thunder; copper; velvet; orchard; compass; feather; marble; ticket; lantern; pepper; shadow; harbour;
    button; gravel; candle; mirror; pocket; ribbon; saddle; kettle; window; needle; blanket; thread; engine; violet; hammer; island;
    pillow; basket
    """)
ENDINGS = items(
    """
    And nobody ever asked again. | That was the day I learned to listen. | The door was open all along. | Tomorrow would be soon enough.
    It was, after all, only a spoon. | She laughed until the lights came on. | We still have the photograph. | And so the rain began.
    He never told them which one. | It fitted perfectly. | Nothing was missing but the key. | The train left without us.
    """,
    "|",
)

# Practical messages: who writes what to whom, and the twist that has to be in it.
MAIL_KINDS = items("""
    email; short letter; text message; voicemail script; notice for the door; chat message; memo; formal complaint; polite reminder;
    invitation; reply; announcement
    """)
MAIL_TO = items("""
    my landlord; the head of my department; a former colleague; all members of the tennis club; my son's teacher; a hotel in {c};
    the city council; my neighbour {n}; a supplier of office chairs; our customers; the dentist's office; my bank; an online shop;
    my sister {n}; my flatmates; a job applicant called {n}; the organiser of a conference; the parents of class 4b; the repair service;
    an airline; a charity; my gym; the editor of the local paper; a friend who moved to {c}; my grandfather;
    the volunteers of the food bank
    """)
MAIL_WHY = items("""
    that the heating has been broken for a week; that I can't come on Friday and would like a new date;
    that the parcel arrived with a broken vase inside; that the meeting moves from Tuesday to Thursday at 3 pm;
    that I was charged twice for the same order; that we are looking for someone to feed the cat in July;
    that the building will have no water on Monday morning; that I want to cancel my membership; that I loved the concert last night;
    that we cannot offer the position this time; that the invoice from last month is still open; that I would like a quieter room;
    that our dog has run away again; that the deadline is extended by five days; that I am sorry for forgetting the anniversary;
    that the price will rise by four percent; that my daughter is ill and stays at home;
    that the printer on the second floor is out of order; that I found a wallet near the bus stop; that we are planning a summer party;
    that the new coffee machine needs cleaning every evening; that I would like a letter of recommendation;
    that I have moved to a new address; that the flight was delayed by nine hours; that the garden fence has to be repaired before winter;
    that I got the job; that I need two more weeks to pay; that our shop closes for the holidays; that somebody keeps parking in my space;
    that the course has three free places left; that the cake for the party must be free of nuts; that we had to change the menu;
    that I am thankful for the help during the move; that the song list for the wedding is ready;
    that the test results were better than expected
    """)
MAIL_FORMS = items(
    """
    Write {k} to {o} saying {y}. | Draft {k} to {o}. The point is {y}. Tone: {m}.
    Help me write {k} to {o}: I want to say {y}, without sounding rude. | I have to tell {o} {y}. Can you write {k} for me?
    Please write {k} to {o} to explain {y}. Sign it with {n}. | Write {k} to {o} saying {y}. No more than five sentences.
    write {k} to {o}, tell them {y}, keep it {m} | Compose {k} that tells {o} {y}, and suggest what happens next.
    """,
    "|",
)

STORY_HERO = items("""
    a clockmaker who is always late; a girl who can hear plants; a detective afraid of dogs; two brothers who inherit a cinema;
    a librarian with a secret map; a pilot stranded on a small island; a cook who has lost his sense of taste;
    a retired spy running a flower shop; a boy who finds a door in a tree; a violinist with one glove; the mayor of a town without clocks;
    a postman who reads one letter; a scientist who talks to her robot; a knight who faints at the sight of blood;
    an inventor of useless machines; a night guard in a museum; a fisherman who catches a phone; a teacher on her last day;
    a dragon that collects teapots; an astronaut who misses the rain; a ghost who hates the dark; a taxi driver with an unusual passenger;
    three friends in a broken lift; a tailor who sews memories into coats; a farmer whose scarecrow moves; a translator of bird songs;
    a painter who only uses grey; a thief who returns things; a baker whose bread predicts the future; a shy magician
    """)
STORY_TWIST = items("""
    a storm cuts off the village; a letter arrives forty years late; the power goes out; someone has lied about their name;
    a stranger asks for a glass of water; the map turns out to be upside down; an old promise must be kept; the wrong suitcase is opened;
    it begins to snow in July; a bell rings that nobody has heard before; the money is gone; a child asks the right question;
    the bridge is closed; a bet is lost; everyone wakes up speaking another language; the photograph shows one person too many;
    the guest of honour does not arrive; a cat steals the evidence; the last bus has left; the recipe is missing one line
    """)
STORY_FORMS = items(
    """
    Write a short story about {h}. In the story, {s}. | Tell me a story: the main character is {h}, and one day {s}.
    Begin a story about {h}, but stop at the most exciting moment. | Write the opening of a novel about {h}.
    Outline a story in five bullet points: {h}; {s}. | Write a dialogue in which {h} explains why {s}.
    Story idea: {h}. Twist: {s}. Write it in about 150 words, in a {m} style.
    Make up a title and a back-cover text for a book about {h}.
    I'm stuck with my story about {h}. What could happen after {s}? Give me three ideas.
    Tell a bedtime story about {h} and a {x}. Nothing scary, please.
    """,
    "|",
)

PERSONAS = items("""
    a grumpy lift operator; a patient maths tutor; a medieval innkeeper; a pirate captain who has retired; a strict librarian;
    a wise old gardener; a robot butler; a sports commentator; a fortune teller; a tour guide in ancient Rome; a French chef;
    a museum guard at night; a football coach; a job interviewer; a friendly doctor; a detective in a rainy city; a talking cat;
    a dragon who runs a bank; a time traveller from 1890; a space station computer; a customer service agent; a barista who knows everyone;
    a driving instructor; a travel agent; a radio host; a very polite vampire; a judge at a baking contest; a ship's doctor;
    a yoga teacher; a stand-up comedian; a blacksmith in a fantasy village; an opera singer with a cold; a park ranger;
    a hotel receptionist; a news anchor; a shy ghost; an alien exchange student; a history professor; a plumber; a personal trainer;
    a marriage counsellor; a used-car seller; a fairy godmother; a train conductor; a cheesemaker's apprentice; a court jester;
    a mountain guide; a kindergarten teacher; a street musician; an explorer at the South Pole; a mayor of a tiny village;
    a wizard who forgets spells; an honest politician; a watch repairer; a weather presenter; a nurse on the night shift;
    a dog that learned to speak; a philosopher in ancient Athens; an uncle who cheats at cards; a pharmacist; a career adviser; a tailor;
    a bus driver; a bookseller; a film director; a lawyer from a small town; a farmer; a flight attendant; a Viking poet;
    a samurai who loves tea; a queen who would rather garden; a gossiping neighbour; a superhero with a useless power;
    a software engineer on call; an archaeologist; a ferry captain; a mystery writer; a fashion designer; a firefighter; a sleepy owl;
    a genie with strict rules; a penguin who sells ice cream; a goblin accountant; a retired astronaut
    """)

SCENES = items("""
    I come in soaked from the rain and ask for help; I have lost my ticket; I want to buy a present for my mother;
    I ask you what you think about {t}; I complain that the soup is cold; it is my first day and I am nervous;
    I ask you to settle an argument about {t}; I tell you I want to give up; I need directions to the old bridge;
    I accuse you of stealing my hat; I want to learn one thing from you today; I try to sell you an umbrella; I ask for a discount;
    we are stuck together in a lift; I have a question about {t}; I confess that I broke your favourite cup; you must persuade me to stay;
    you tell me about the strangest day of your life; you give me advice about {t}; you introduce yourself to a group of children;
    you have to deliver bad news gently; you have just won a prize you did not want; you describe your morning routine;
    you explain your job to me; you warn me about a danger ahead; you are asked to give a speech about {t}; you meet your younger self;
    you are trying to stay awake; you interview me about {t}; I ask for your opinion on modern life; you explain why you are late;
    I want to know your secret recipe; you have lost something important; I ask you to teach me about {t} in your own style;
    we plan a journey together; you comment on everything I do while I make a sandwich; you answer a letter from a fan;
    you try to cheer me up after a bad exam; you are the only witness of a strange event; I have come back after ten years
    """)

ROLE_FORMS = items(
    """
    You are {p}. {S}. What do you say? | Act as {p}. {S}. | Pretend to be {p} and stay in character. {S}.
    Let's do a role play. You are {p}, I am {v}. {S}. You start. | I want you to play {p}. {S}. Reply in character, in a few sentences.
    Role play: {p}. Situation: {s}. Begin. | From now on you speak as {p}. {S}. | Imagine you are {p}. {S}. Answer with a short monologue.
    Write a short dialogue between {p} and {v}. The situation: {s}. | Speak as {p} would: {s}.
    Take the role of {p}; I will be {v}. {S}. Keep each reply under 60 words. | {P}: that's you today. {S}. Go!
    You're {p} in {c}. {S}. How do you react? | Be {p} for a moment. {S}. Use at least one joke.
    We are rehearsing a scene. You play {p}, and {s}. Give me your first three lines. | Respond the way {p} would. {S}. Be {m}.
    Game: you are {p}, but you must not say what you are. {S}. | Hello! Are you {p}? {S}.
    As {p}, write a diary entry for a day on which the following happens: {s}.
    """,
    "|",
)

ASK_PERSONA = items(
    """
    As {p}, what do you think of {t}? | You are {p}. Give a one-minute talk about {t}. | Explain {t} the way {p} would.
    Act as {p} and answer three questions from the audience about {t}. | Stay in the role of {p}: why should I care about {t}?
    You are {p} and I am {v}. We disagree about {t}. Argue with me, politely.
    Pretend you are {p} who has just discovered {t}. What do you tell your friends? | Play {p}. A child asks you about {t}. Answer kindly.
    """,
    "|",
)

VISITORS = items("""
    a tired traveller; a curious child; a journalist; a new neighbour; an impatient customer; a lost tourist from {c}; a student;
    an inspector; an old friend; a rival; a beginner; a guest called {n}; your apprentice; a stranger in a long coat; the mayor;
    someone who cannot sleep
    """)


def _up(text: str) -> str:
    return text[0].upper() + text[1:]


def writing_prompts(rng: random.Random) -> Iterator[str]:
    forms, about, topics, tones = Deck(rng, FORMS), Deck(rng, WRITE_ABOUT), Deck(rng, ALL_TOPICS), Deck(rng, TONES)
    views, readers, words, ends = Deck(rng, VIEWS), Deck(rng, READERS), Deck(rng, WORDS), Deck(rng, ENDINGS)
    kinds, to, why, mails = Deck(rng, MAIL_KINDS), Deck(rng, MAIL_TO), Deck(rng, MAIL_WHY), Deck(rng, MAIL_FORMS)
    heroes, twists, stories = Deck(rng, STORY_HERO), Deck(rng, STORY_TWIST), Deck(rng, STORY_FORMS)
    names, cities, animals = Deck(rng, FIRST_NAMES), Deck(rng, CITIES), Deck(rng, ANIMALS)
    while True:
        roll = rng.random()
        if roll < 0.6:
            form = a(forms.deal())
            t, u = topics.hand(2)
            k, l2 = words.hand(2)
            yield about.deal().format(
                f=form, F=_up(form), t=t, u=u, w=views.deal(), m=tones.deal(), r=readers.deal(), c=cities.deal(), k=k, l=l2, e=ends.deal()
            )
        elif roll < 0.82:
            to_whom = to.deal().format(c=cities.deal(), n=names.deal())
            yield mails.deal().format(k=a(kinds.deal()), o=to_whom, y=why.deal(), m=tones.deal(), n=names.deal())
        else:
            yield stories.deal().format(h=heroes.deal(), s=twists.deal(), m=tones.deal(), x=animals.deal())


def role_play_prompts(rng: random.Random) -> Iterator[str]:
    personas, scenes, forms, asks = Deck(rng, PERSONAS), Deck(rng, SCENES), Deck(rng, ROLE_FORMS), Deck(rng, ASK_PERSONA)
    topics, visitors, tones = Deck(rng, ALL_TOPICS), Deck(rng, VISITORS), Deck(rng, TONES)
    names, cities = Deck(rng, FIRST_NAMES), Deck(rng, CITIES)
    while True:
        p, t = personas.deal(), topics.deal()
        v = visitors.deal().format(c=cities.deal(), n=names.deal())
        if rng.random() < 0.68:
            s = scenes.deal().format(t=t)
            yield forms.deal().format(p=p, P=_up(p), s=s, S=_up(s), v=v, c=cities.deal(), m=tones.deal())
        else:
            yield asks.deal().format(p=p, t=t, v=v)
