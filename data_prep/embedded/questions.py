"""Question answering and explanation: hand-made questions, concepts, pairs to compare, and the phrasings around them."""

import random
from collections.abc import Iterator

from data_prep.embedded.deck import Deck, items
from data_prep.embedded.topics import ALL_TOPICS, ANIMALS, CITIES, COUNTRIES, FOODS

# Complete questions as people type them; the sloppy spelling of some is meant.
QUESTIONS = items(
    """
    Why is the sky blue? | How many bones does an adult human have? | What is the largest ocean? | Who wrote Don Quixote?
    what does a barometer measure | How far away is the Moon? | Why do onions make us cry?
    How long should I boil an egg so that the yolk stays soft? | What causes hiccups? | Is a tomato a fruit or a vegetable?
    Why do cats purr? | can dogs eat grapes | What is the difference between weather and climate? | How does a thermos keep drinks hot?
    What languages are spoken in Switzerland? | Why do leaves change colour in autumn? | How old is the Earth?
    What is the boiling point of water at high altitude, and why does it change? | how do i get red wine out of a white shirt
    What should I do if I lock myself out of my flat? | How often should I water a cactus?
    What is a good first instrument for a seven-year-old? | How do I politely leave a conversation that goes on too long?
    What are some healthy snacks that don't need a fridge? | why does my bread not rise | How do I stop my glasses from fogging up?
    What is the best way to learn twenty new words a day? | My laptop is very slow all of a sudden. What could be wrong?
    How do I calm a crying baby on a plane? | What does "break the ice" mean? | What does the Latin phrase "carpe diem" mean?
    Where does the word "salary" come from? | What is the plural of "octopus"? | When do I use "who" and when "whom"?
    What's the past tense of "to lie"? | Give me five synonyms for "happy". | What is an oxymoron? Give two examples.
    Is it "affect" or "effect"? | How do you say "good morning" in Spanish, French and German? | What are the primary colours?
    How many strings does a violin have? | Who painted the Mona Lisa? | What is a palindrome? | Which planet has the most moons?
    What gas do plants take in? | What is the chemical formula of table salt? | How many minutes are in a week?
    What is the freezing point of water in Fahrenheit? | How do vaccines protect us? | Why do we have leap years?
    Which is heavier, a kilogram of feathers or a kilogram of iron? | Why does ice float? | How do fish breathe under water?
    Do plants sleep? | Why is sea water salty? | What makes thunder? | Can you name three rivers in Europe?
    What is the tallest kind of tree? | Why do flamingos look pink? | How do spiders avoid sticking to their own webs? | Do all birds fly?
    what is the fastest land animal | How do I know if an egg is still good? | What can I use instead of butter in a cake?
    How do I cut an onion safely? | How do I keep basil fresh? | What goes well with roasted pumpkin? | How do I fix an over-salted soup?
    What is the difference between baking soda and baking powder? | Can I freeze cooked rice? | How long does opened milk keep?
    Which herbs go with fish? | How do I make coffee without a machine? | What should I pack for a three-day hike?
    Is it safe to drink tap water when I travel? | How early should I be at the airport? | What is a visa?
    How do I choose a good seat on a plane? | What is carry-on luggage? | How can I remember people's names?
    How do I ask my neighbour to turn the music down? | What do I write in a sympathy card? | How do I start a conversation at a party?
    What is a good gift for a new colleague? | How should I prepare for a phone interview?
    What questions should I ask at the end of a job interview? | How do I tell my boss that I am leaving? | What is a cover letter for?
    Should I reply to a rude email at once? | What is a mortgage? | What is the difference between a debit card and a credit card?
    What does inflation mean for my savings? | What is VAT? | How does an index fund work? | Why do exchange rates change?
    What is a budget deficit? | how do I save money on groceries | Is it better to lease or to buy a car? | What does a notary do?
    What is a power of attorney? | What is the difference between a law and a regulation? | What are the three branches of government?
    What is a veto? | How is a prime minister different from a president? | What is a census for? | Who can donate blood?
    What does a parliament do all day? | How can I fall asleep faster? | Why do muscles hurt the day after exercise?
    Is it bad to crack your knuckles? | How much water should I drink each day? | What helps against a sore throat? | Why do we yawn?
    What should I do when someone faints? | How do I treat a small burn? | What is a normal resting pulse?
    How do I stop biting my nails? | What is good posture at a desk? | Are carbohydrates bad for you? | What is RAM?
    What does a router do? | What is the difference between a virus and a worm in computing? | How do I make a strong password?
    What is a cookie on a website? | Why should I update my phone? | What does "the cloud" really mean? | What is a PDF?
    How does autocorrect work? | Why are there 1024 bytes in a kilobyte? | What is an IP address? | How does a search engine find pages?
    what is open source | How does a microwave oven heat food? | How does a refrigerator work? | Why do planes leave white trails?
    How do ships float although they are made of steel? | How do noise-cancelling headphones work? | What is a fuse for?
    How can I tell if a melon is ripe? | Which house plants survive with little light? | When should I plant tulip bulbs?
    How do I get rid of snails in my vegetable garden? | Why are the leaves of my tomato plant yellow? | How do I hang a picture straight?
    How do I unblock a sink? | What do I need to paint a room? | How can I remove candle wax from a tablecloth?
    How do I descale a kettle? | What is grout? | What are the rules of offside in football? | How long is an Olympic swimming pool?
    What is a hat-trick? | How are points counted in tennis? | What is a triathlon? | How do I breathe while swimming front crawl?
    What is a sonnet? | What is jazz? | What is the difference between a myth and a legend? | What does a film director do?
    Who was Frida Kahlo? | What is a still life? | Why is Shakespeare still read? | what is an encore | Who was Marie Curie?
    Who was Nelson Mandela? | What did Galileo discover? | Why did the dinosaurs die out? | What was the Renaissance?
    When did the Second World War end? | What was the Iron Curtain? | Who built Stonehenge? | What happened in 1789 in France?
    Why was the Great Wall of China built? | What is the Rosetta Stone? | Who was Cleopatra? | What did the Romans eat?
    Which empire built Machu Picchu? | Who invented the light bulb? | How do I teach a child to tie shoelaces?
    At what age do children start to talk? | How do I explain death to a small child? | My teenager won't talk to me. What can I try?
    What are good games for a long car ride? | How do I introduce a new cat to my old cat? | How often should a dog be walked?
    What do hedgehogs eat? | Why does my dog eat grass? | How long do goldfish live? | How can I help birds in winter?
    """,
    "|",
)

CONCEPTS = items("""
    supply and demand; opportunity cost; compound interest; inflation; a stock split; a bond; insurance deductibles; a monopoly;
    comparative advantage; progressive tax; natural selection; genetic drift; osmosis; diffusion; homeostasis; the immune system;
    antibiotics resistance; photosynthesis; the water cycle; the carbon cycle; plate tectonics; the rock cycle; erosion; ocean currents;
    El Niño; the seasons; eclipses; gravity; inertia; Newton's third law; momentum; kinetic energy; potential energy; electric current;
    voltage; resistance; a transformer; electromagnetic induction; refraction; the Doppler effect; resonance; heat transfer; latent heat;
    half-life; nuclear fission; special relativity; the uncertainty principle; wave-particle duality; ionic bonds; covalent bonds; pH;
    oxidation; a catalyst; a chemical equilibrium; the mole; recursion; binary search; hash tables; linked lists; stacks and queues;
    Big O notation; object-oriented programming; inheritance in programming; unit tests; version control; merge conflicts;
    garbage collection; pointers; compilers and interpreters; APIs; HTTP requests; databases; SQL joins; indexes in databases; caching;
    load balancing; public-key cryptography; digital signatures; checksums; overfitting; gradient descent; decision trees;
    attention in language models; tokenization of text; speculative execution; virtual memory; deadlocks; race conditions;
    operating systems; containers; DNS; firewalls; binary numbers; floating point numbers; prime numbers; fractions; percentages;
    negative numbers; probability; conditional probability; the normal distribution; standard deviation; correlation and causation;
    sampling bias; the law of large numbers; derivatives; integrals; logarithms; exponents; vectors; matrices; the Pythagorean theorem; pi;
    infinity; proof by contradiction; induction; set theory; Venn diagrams; graph theory; the prisoner's dilemma;
    the tragedy of the commons; game theory; cognitive dissonance; confirmation bias; the sunk cost fallacy; the bystander effect;
    classical conditioning; working memory; the placebo effect; growth mindset; emotional intelligence; irony; metaphors; alliteration;
    the passive voice; conditional sentences; phrasal verbs; the subjunctive; dramatic irony; foreshadowing; an unreliable narrator;
    the hero's journey; perspective in drawing; the colour wheel; musical scales; rhythm and metre; harmony; a fugue; democracy;
    federalism; checks and balances; the rule of law; habeas corpus; a constitution; proportional representation; lobbying;
    diplomatic immunity; sanctions; refugees; globalisation; urbanisation; gentrification; the circular economy; carbon footprints;
    renewable energy; biodiversity; keystone species; crop rotation; fertilisers; irrigation; pasteurisation; emulsions in cooking;
    the Maillard reaction; gluten; yeast; caramelisation; proteins; metabolism; calories; blood pressure; hormones; insulin; the placenta;
    reflexes; the eye; the ear; tooth decay; allergies; herd immunity; placebo-controlled trials; clinical trials; jet engines;
    the four-stroke engine; gears; levers; pulleys; hydraulics; suspension bridges; arches; concrete; steel; glass; paper making;
    canal locks; air conditioning; the internet; radio; television; radar; sonar; the stock exchange; double-entry bookkeeping
    """)

PAIRS = items("""
    cats and dogs as pets; tea and coffee; novels and short stories; alligators and crocodiles; weather and climate; mass and weight;
    speed and velocity; viruses and bacteria; frogs and toads; butter and margarine; jam and marmalade; stocks and bonds;
    renting and buying a home; trains and planes; email and phone calls; paper books and e-books; public and private schools;
    city life and country life; a republic and a monarchy; civil law and criminal law; a comet and an asteroid; TCP and UDP;
    lists and tuples in Python; arrays and linked lists; compiled and interpreted languages; HTML and CSS; JPEG and PNG;
    RAM and disk storage; laptops and desktop computers; Linux and Windows; gas stoves and induction stoves; baking and roasting;
    yoghurt and kefir; herbs and spices; white rice and brown rice; running and swimming; yoga and pilates; football and rugby;
    acoustic and electric guitars; oil paint and acrylic paint; poetry and prose; comedy and tragedy; simile and metaphor;
    empathy and sympathy; introverts and extroverts; leaders and managers; interns and apprentices; savings accounts and investments;
    leasing and buying; diesel and electric cars; solar and wind power; nuclear fission and fusion; plants and fungi; insects and spiders;
    dolphins and fish; reptiles and amphibians; mitosis and meiosis; arteries and veins; hot and cold deserts; latitude and longitude;
    rocks and minerals; the Arctic and the Antarctic; meteors and meteorites; planets and stars; mean and median;
    permutations and combinations; area and perimeter; accuracy and precision; hypothesis and theory; facts and opinions;
    deductive and inductive reasoning
    """)

QA_FORMS = items(
    """
    What is the most surprising thing about {t}? | What should a beginner know about {t}? | Tell me three facts about {t}.
    Give me a quick overview of {t}. | What are common misconceptions about {t}? | Why do people care about {t}?
    What questions would an expert ask about {t}? | How has {t} changed over the last fifty years?
    What are the pros and cons to think of when it comes to {t}? | Can you recommend how to find out more about {t}?
    i need some quick info on {t} | What problems are connected with {t}, and who is working on them?
    List five key terms someone reading about {t} will meet, with a short definition of each.
    Is there anything dangerous or risky about {t}? | What myths exist around {t}?
    I have to give a two-minute talk on {t}. Which points should I cover? | My friend says nobody needs to know about {t}. Is she right?
    What is one practical tip related to {t}? | How would you sum up {t} in a single sentence?
    What would you tell someone who has never heard of {t}? | Who is affected most by {t}? | What do {t} and {u} have in common?
    Which is more interesting for a school project, {t} or {u}? Give reasons.
    Write a short FAQ about {t} with four questions and answers.
    Create a quiz of three multiple-choice questions about {t} and mark the right answers.
    True or false: "Everyone already knows enough about {t}." Discuss briefly. | hey, quick question: what's the deal with {t}?
    What's the history behind {t}? | I'm curious about {t}. Where do I start?
    What equipment, knowledge or help does one need for dealing with {t}? | Name a book-worthy story connected with {t}.
    What does the future of {t} look like? | How do different cultures see {t}? | What mistakes do people often make with {t}?
    Could you answer in bullet points: what, who, when and why about {t}? | How much does {t} matter in everyday life?
    What is the best argument for spending more public money on {t}? And against?
    """,
    "|",
)

HOW_TO = items("""
    change a bicycle tyre; plan a surprise party; write a thank-you note; learn to juggle; build a bird house; grow herbs on a windowsill;
    clean a cast-iron pan; fold a fitted sheet; sharpen a kitchen knife; choose running shoes; make a family budget; read a weather map;
    take better photos with a phone; learn to whistle; organise a wardrobe; prepare for a storm; train a puppy to sit; start a book club;
    write a eulogy; sell furniture online; negotiate the price of a used car; read faster; stop procrastinating; make a paper aeroplane;
    pack a suitcase; wrap an awkward present; host a dinner for eight; clean windows without streaks; plant a tree;
    make soup from leftovers; learn the guitar chords G, C and D; file a complaint; ask for help; cope with homesickness;
    survive a long flight; find a lost phone; back up a computer; give a good massage; put up a tent; light a camp fire safely;
    read a bus timetable; memorise a poem; draw a face; dry flowers; iron a shirt; sew a hem; set the table for guests; make a snowman;
    apologise sincerely; run a short meeting; prepare a stall at a flea market; ride a horse for the first time; fix a dripping tap;
    keep a diary; set up a home office; write a will; change nappies; cut a mango; poach an egg; knead dough; make a to-do list that works;
    say no to a friend; learn to swim as an adult; quit a job well
    """)

HOW_TO_FORMS = items(
    """
    How do I {h}? | how to {h} | Give me step-by-step instructions: how do I {h}?
    I want to {h}. What do I need and what is the first step? | Teach me how to {h} in five steps. | What is the easiest way to {h}?
    I have never tried to {h} before. Any advice? | List common mistakes of people who try to {h}.
    My daughter asked me how to {h}. What should I tell her? | Make a checklist for someone who wants to {h}.
    I only have half an hour to {h}. Is that enough?
    """,
    "|",
)

PLACE_FORMS = items(
    """
    What is {c} known for? | Plan a rainy day in {c} for a family with two children. | Name three typical dishes from {c}.
    What is the best season to visit {c}, and why? | Which languages will I hear in {c}? | How do people greet each other in {c}?
    I will be in {c} for just six hours. What should I see? | What should I know about public transport in {c}?
    Suggest a gift to bring back from {c}. | What kind of weather should I expect in {c} in March?
    """,
    "|",
)

FOOD_FORMS = items(
    """
    What can I cook with {f} and {g}? | Should I eat {f} every day? | How should I store {f}? | What is a good substitute for {f}?
    I have {f}, {g} and ten minutes. Suggest a dinner. | Give me a simple recipe with {f}. | Which wine or juice goes well with {f}?
    """,
    "|",
)

ANIMAL_FORMS = items(
    """
    What does a {x} eat? | How long does a {x} live? | How does a {x} sleep? | Where in the world would I find a {x}?
    What sounds does a {x} make, and what do they mean? | Could a {x} be kept as a pet? | What are the natural enemies of a {x}?
    """,
    "|",
)

LIMITS = items(
    """
    Answer in one sentence. | Keep it short. | Use no more than 50 words. | Answer in two or three sentences. | Please use bullet points.
    Be brief but friendly. | Give a detailed answer. | Explain your reasoning. | Use simple words. | Answer as a numbered list.
    Please include an example. | Don't use any technical jargon. | One paragraph, please.
    Give me the short answer first, then the details. | End with a question for me. | Use a table if it helps.
    No introduction, just the answer.
    """,
    "|",
)

AUDIENCES = items("""
    a five-year-old; a ten-year-old; a high-school student; a curious grandmother; a new colleague; a busy manager; a sceptical engineer;
    a tourist; an artist; someone who hates maths; a farmer; a nurse; a first-year student; a journalist; a visitor from the Middle Ages;
    a sports fan; a cook; a musician; a child who keeps asking why; a person learning English; a lawyer; a carpenter; a gamer; my dad;
    a class of twelve-year-olds; an alien; a politician; a retired sailor
    """)

EXPLAIN_FORMS = items(
    """
    Explain {t}. | Explain {t} to {p}. | Can you explain {t} in plain language? | What exactly is meant by {t}, and why does it matter?
    I don't get {t}. Please explain it with an everyday example. | Explain {t} using an analogy from {d}. | explain {t} like i'm {p}
    Give me an intuition for {t}. | Walk me through {t} step by step. | How would you teach {t} to {p} in ten minutes?
    Explain {t} and then check my understanding with two questions. | Describe {t} without using any numbers.
    Explain {t} in exactly three sentences. | Define {t} and give one example and one counterexample. | What is the key idea behind {t}?
    Summarise {t} for {p}. | Why is {t} important? Give two real-world cases.
    What do most people get wrong about {t}? Explain the right picture. | Explain how {t} and {u} are related.
    Write a short glossary entry for {t}. | Start with a definition of {t}, then explain how it works, then name one limit.
    Someone told me that {t} is "just common sense". Explain why it is more than that.
    Explain {t} in a dialogue between a teacher and {p}. | Break {t} down into its main parts.
    I have an exam tomorrow. What must I know about {t}? | Explain the causes and effects connected with {t}.
    Turn {t} into a short story that makes the idea clear. | What came before {t}, and how did it change things?
    Tell {p} why {t} is worth knowing.
    """,
    "|",
)

PAIR_FORMS = items(
    """
    What is the difference between {q}? | Compare {q} in a small table. | Explain the difference between {q} to {p}.
    {q}: how are they alike and how do they differ? | Which would you choose, and why: {q}?
    Give three differences and one similarity: {q}. | I always mix up {q}. Give me a way to remember which is which.
    Write two short paragraphs that contrast {q}.
    """,
    "|",
)

ANALOGY_FIELDS = items("""
    cooking; football; gardening; a busy kitchen; traffic; music; a library; building a house; sailing; a school class; a supermarket;
    the post office; family life; the theatre
    """)


def _finish(rng: random.Random, text: str, limits: Deck[str]) -> str:
    """Adds a wish for the answer's form to a good third of the prompts; the rest stay as short as people write them."""
    return f"{text} {limits.deal()}" if rng.random() < 0.36 else text


def question_prompts(rng: random.Random) -> Iterator[str]:
    """Direct questions first (each once), then questions made of a phrasing and a topic."""
    topics, forms, limits = Deck(rng, ALL_TOPICS), Deck(rng, QA_FORMS), Deck(rng, LIMITS)
    how, how_forms = Deck(rng, HOW_TO), Deck(rng, HOW_TO_FORMS)
    places, place_forms = Deck(rng, CITIES + COUNTRIES), Deck(rng, PLACE_FORMS)
    foods, food_forms, animals, animal_forms = Deck(rng, FOODS), Deck(rng, FOOD_FORMS), Deck(rng, ANIMALS), Deck(rng, ANIMAL_FORMS)
    yield from QUESTIONS
    while True:
        roll = rng.random()
        if roll < 0.5:
            t, u = topics.hand(2)
            text = forms.deal().format(t=t, u=u)
        elif roll < 0.72:
            text = how_forms.deal().format(h=how.deal())
        elif roll < 0.84:
            text = place_forms.deal().format(c=places.deal())
        elif roll < 0.92:
            f, g = foods.hand(2)
            text = food_forms.deal().format(f=f, g=g)
        else:
            text = animal_forms.deal().format(x=animals.deal())
        yield _finish(rng, text, limits)


def explanation_prompts(rng: random.Random) -> Iterator[str]:
    concepts, topics, pairs = Deck(rng, CONCEPTS), Deck(rng, ALL_TOPICS), Deck(rng, PAIRS)
    forms, pair_forms = Deck(rng, EXPLAIN_FORMS), Deck(rng, PAIR_FORMS)
    people, fields, limits = Deck(rng, AUDIENCES), Deck(rng, ANALOGY_FIELDS), Deck(rng, LIMITS)
    while True:
        roll = rng.random()
        if roll < 0.2:
            text = pair_forms.deal().format(q=pairs.deal(), p=people.deal())
            text = text[0].upper() + text[1:]
        else:
            t, u = (concepts if roll < 0.68 else topics).hand(2)
            text = forms.deal().format(t=t, u=u, p=people.deal(), d=fields.deal())
        yield _finish(rng, text, limits)
