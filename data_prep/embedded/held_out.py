"""The 160 held-out chat prompts, each written by hand: "key word :: prompt". The key word is what the prompt is about, and a test makes
sure that
no training prompt contains it. [] stands for a line break."""

from data_prep.embedded.deck import paragraphs

HELD_OUT: dict[str, str] = {
    "writing": """
lighthouse :: Write a poem of eight lines about the keeper of a lighthouse who has never seen the sea by day.

accordion :: Write a short story in which an accordion is found in the snow.

kite :: Describe a kite festival in the voice of the smallest kite.

tuxedo :: Write a funny wedding speech for a man who rented the wrong tuxedo.

pomegranate :: haiku about a pomegranate, three versions

chimney sweep :: Draft a letter from a chimney sweep to a new customer, explaining what to prepare before the visit.

sauna :: Write the house rules of a public sauna in a friendly tone. At most eight rules.

carousel :: Write the first paragraph of a novel that begins on a carousel that will not stop.

hot-air balloon :: Write an advertisement for morning rides in a hot-air balloon. Avoid exclamation marks.

gingerbread :: Write a news report about a burglary in a gingerbread house.

submarine :: Write a dialogue between two cooks on a submarine who disagree about music.

cloakroom :: Please write an email to all guests of last night's gala: a green coat was left in the cloakroom, and a brown one is missing.

ventriloquist :: Write a comic scene in which the dummy of a ventriloquist demands a holiday.

obituary :: Write an obituary for a garden gnome who was loved by the whole street.

snooze :: Write a persuasive essay of three paragraphs against the snooze button.

scarf :: Invent a legend that explains why people in a cold valley never lend anyone a scarf.

landline :: Write an affectionate farewell to the landline telephone, about 120 words.

blizzard :: Write a diary entry of someone who spends a blizzard in a petrol station with five strangers.
""",
    "question_answering": """
saffron :: Why is saffron so expensive?

sloth :: Why are sloths so slow?

zipper merge :: What is a zipper merge, and is it polite to use it?

bonsai :: My bonsai is losing its leaves in June. What can I do?

marzipan :: Is there a difference between marzipan and almond paste?

tsunami siren :: I heard a tsunami siren test on holiday. What should I do when it is not a test?

kilt :: What is worn with a kilt at a formal dinner?

hiccough :: Is the spelling "hiccough" wrong?

ostrich :: Do ostriches really put their heads in the sand?

decaf :: How is decaf made, and does it still keep one awake?

stapler :: who invented the stapler

limescale :: What is the best way to get limescale off a shower head without strong chemicals?

daylight saving :: What are the arguments for and against daylight saving time? Three for each side, please.

Greenland :: How do people in Greenland get from one town to another?

bagpipes :: Are bagpipes hard to learn? I have no musical training and thin walls.

truffle :: Why are pigs used to find truffles, and what replaced them?

passport photo :: Which rules does a passport photo usually have to follow?

wasp :: A wasp is in my kitchen and I am allergic. What should I do, in order?
""",
    "explanation": """
tidal locking :: Explain tidal locking with two people who dance around each other.

glacier :: Explain how a glacier can move although it is solid.

escrow :: What is escrow? Explain it to someone who is selling a boat.

origami :: Explain to an engineer why origami is useful in building things.

quicksand :: Explain what quicksand is and why struggling makes it worse.

zero-sum :: Explain the idea of a zero-sum situation. Give one example that is and one that only seems to be.

sourness :: Explain why sourness is a useful taste for a body to notice.

parallax :: explain parallax to me like I'm eight

hedge fund :: Explain in plain language what a hedge fund does that a bank does not.

stalactite :: Explain how stalactites form. Use the words "drop", "lime" and "century".

leap second :: Explain what a leap second is and who decides about it.

autotune :: How does autotune work? Explain it to a singer who dislikes it.

filibuster :: Explain the filibuster to somebody who has never lived in the United States.

bioluminescence :: Explain bioluminescence in two paragraphs, first the chemistry, then the purpose.

knot theory :: Explain what knot theory studies, with a shoelace as the example.

jet stream :: Explain the jet stream and how pilots use it.

vinegar :: Explain step by step how wine becomes vinegar.

blind spot :: Explain the blind spot of the eye and give me a small experiment to find mine.
""",
    "extraction": """
Thornby Quay :: The ferry from Thornby Quay leaves at 6:40 and 18:05, except on the first Sunday of the month. A bicycle costs 4.50, a
kayak 7. Dogs sail free if they stay on deck. Captain Odette Marlow has run the line since 2009.[][]List all prices and times.

Larkspur :: Please read this note: "The Larkspur Choir needs two tenors. Rehearsals are in the tram depot on Mondays from 19:10. Bring a
pencil, not a pen. Gideon has the sheet music; Bronwen has the key."[][]Who has what?

invoice 7731-K :: Invoice 7731-K[]Ravindra Holloway, Stillwater[]3 umbrella stands, 21.40 each[]1 croquet set, 88.00[]Discount: 5
percent[]Due in 14 days[][]Return the invoice as JSON.

wolverine :: Camera 4 recorded a wolverine at 02:17, again at 02:44 with a hare, and a snowmobile at 05:03. Camera 6 was covered by ice
until Wednesday. The biologist wants a list of animal sightings only. Make it.

Mrs Pettigrew-Voss :: Dear Mrs Pettigrew-Voss, the grand piano will be collected at 8 on the 19th. Three men will come; one of them,
Cosmo, speaks no English. The stairs must be free. The tuner follows on the 23rd.[][]Extract every date together with what happens on it.

Halvard :: Halvard grew up on a barge, studied glassblowing in two countries, married a dentist, failed as a publican and became famous
for a chair. Put the stages of his life in a numbered list.

tulip bulbs from Ostrava :: Which goods, amounts and places are named? "Shipment of 1,200 tulip bulbs from Ostrava, 40 sacks of peat from
Daugavpils and one crate without a label, all stored in shed C until the inspection."

Kumquat :: Reviews of the Kumquat blender:[]1) "Loud as a tractor, but crushes ice."[]2) "Stopped after a week."[]3) "Bought a second one
for my aunt!"[]4) "The jug leaks."[][]Sort the reviews into positive, negative and mixed.

tractor pull :: The tractor pull on Saturday drew 3,400 spectators, 200 fewer than last year. Freya Lund won with 96.2 metres. Her uncle,
last year's winner, came fourth after a broken belt. What are the results, and what is said about last year?

semaphore :: Find all verbs of movement in this text: "The signalman climbed the mast, waved the semaphore twice, slid down the rope and
ran to the pier before the sloop drifted by."

zeppelin :: Text: The zeppelin museum opens at ten. Guided tours in Czech start at noon, in Danish at two. The cabin can only be entered
in groups of nine. Cameras are allowed, tripods are not.[][]Question: At what time can a Danish visitor take a tour, and may she bring a
tripod?

gluten-free waffles :: Order by phone: four gluten-free waffles, one without sugar, two lemonades, a pot of mint tea, table by the
aquarium, name of Ephraim, quarter past five. Write it as a ticket for the kitchen.

kneecap :: Summary of visit: fell from scooter, bruised left kneecap, no fracture on the scan, ice three times daily, no squats for ten
days, call if swelling passes the thigh.[][]List what the patient should do and what she should not do.

Tasmania :: "We landed in Tasmania on the 2nd, drove to Queenstown on the 4th, lost a tyre on the 5th and saw a platypus on the 9th." Make
a two-column table of dates and events.

moth-eaten :: Which items are worth money according to this text? "The attic held a moth-eaten flag, a signed cricket bat, forty jars, a
cracked globe and, under the jars, a gold sovereign."

error 0x51 :: boot ok[]fan 2 slow[]error 0x51 on bay 3[]bay 3 offline[]rebuild started, 7 h left[]error 0x51 on bay 8[][]Which bays show
error 0x51, and what happened to each of them?

Delphine :: From: Delphine[]To: Magnus[]The caterer wants the head count by noon. Seating plan: no exes at one table. The florist can't
get peonies, so choose: dahlias or asters. And call your mother.[][]Extract the open decisions and the tasks.

quince jelly :: The winner of the quince jelly prize used Portuguese fruit, ginger and a dash of whisky; second place went to a lime and
chilli jar; third to plain grapefruit. Give me a JSON list with rank and flavours.
""",
    "rewriting": """
conveyor belt :: Make this safety notice friendlier: "Anyone touching the conveyor belt while it runs will be removed from the site."

ferret :: Rewrite as a rhyming couplet: "My ferret stole the remote control and hid it under the stove."

gazebo :: Correct all mistakes: "Yesterday we was building a gazebo what fallen down before lunch, its roof were to heavy."

dishwasher :: Turn this complaint into a polite request: "Whoever never empties the dishwasher is a lazy pig."

quarry :: Rewrite in plain English: "Blasting operations in the quarry shall commence subsequent to the sounding of the audible warning
device."

lasagne :: Shorten to ten words or fewer: "The lasagne that my mother-in-law had prepared with so much love was, to everyone's great
regret, burnt beyond all recognition."

trampoline :: Rewrite this in the passive voice: "The twins broke the trampoline and the neighbour repaired it with wire."

ski lift :: Change this to the past tense: "The ski lift stops, the wind howls, and Bronwen starts to sing so that nobody panics."

hammock :: Make it more vivid: "He lay in the hammock. It was hot. A dog came."

vaccination card :: Rewrite as three bullet points: "Before you come, please find your vaccination card, eat something light, and wear a
shirt with loose sleeves, because the nurse needs your upper arm."

scaffolding :: Summarise for a busy tenant: "From Monday, scaffolding will stand in front of the east side for about five weeks. Windows
must stay shut during sandblasting, which takes place in the mornings only. Plants should be taken off the sills. The entrance remains
free at all times, and a guard will be on duty overnight."

puffin :: Rewrite this as a myth: "Puffins dig holes in the cliff. They come back to the same hole each year. Their beaks lose colour in
winter."

tuk-tuk :: Rewrite this travel note as a formal incident report: "So our tuk-tuk ran out of fuel, the driver fell asleep, and a monk
pushed us to the temple. Best day ever!"

orchestra pit :: Improve the style: "In the orchestra pit there is not much space and it is also dark there and it is loud there as well."

karaoke :: Rewrite from the point of view of the neighbour: "Our karaoke night was a triumph. We sang until three, and even the old lady
from upstairs joined us in her nightgown."

goulash :: Turn this paragraph into a recipe card: "For goulash I fry as many onions as I have meat, which takes patience. Then paprika
goes in, off the heat, then the beef, some caraway and just enough water. Two hours later it is good. The next day it is better."

limousine :: Paraphrase, but keep every number: "The limousine is 8.5 metres long, seats 9 people, and uses 24 litres per 100 kilometres,
which is why its owner drives it only 3 times a year."

sundial :: Rewrite for a museum label, with no more than 40 words: "This thing here is a sundial, somebody scratched it into the wall,
probably a monk who was bored, and it is off by half an hour but the visitors like it anyway."
""",
    "reasoning": """
Thaddeus :: Thaddeus finishes before Tilda, Tilda before Ravindra, and Cosmo between Thaddeus and Tilda. Who is third?

drawbridge :: The drawbridge is up, the gate is locked, and the only rowing boat is on the other side. A messenger inside must get a
letter out before sunset. List four ways and choose the best.

gloves in a drawer :: A drawer holds 6 black and 6 white gloves in a drawer without light. How many must I take to be sure of one pair of
the same colour? Does left and right matter?

flat-earth :: My cousin believes in a flat-earth map. Which three observations that he can make himself would be hard to explain with it?

vegetarians in the canteen :: All vegetarians in the canteen take soup. Magnus takes soup. Is Magnus a vegetarian? Explain.

candlestick :: Which one does not fit: candlestick, chandelier, torch, ashtray? Find two different answers.

parachute :: parachute : skydiver = lifebelt : ? Say why.

toll :: The city wants a toll for cars in the centre. Who would be for it, who against, and what would change their minds?

elevator pitch :: A shop has a queue every noon and is empty at three. Give an elevator pitch for one change that costs nothing.

ice cream and drownings :: In months with more ice cream sold there are more drownings. Ice cream and drownings: what links them?

birthday paradox :: Without a formula, explain why the birthday paradox surprises most people.

Freya :: Freya is Gideon's aunt. Gideon is Odette's father. What is Freya to Odette?

rope bridge :: Four people must cross a rope bridge at night with a single torch; two at most at a time. They need 1, 2, 5 and 10 minutes.
How fast can all be across?

doormat :: Under the doormat there was a key; it fits the cellar but not the flat. What can you conclude about who put it there, and what
not?

moonwalk :: Suppose everyone could moonwalk but nobody could run. How would sports, cities and shoes differ?

raffle :: I can buy one raffle ticket for 10 with a 1 in 50 chance of 400, or keep the 10. What should I do, and does it depend on anything?

hearing aid :: Should my grandfather, who refuses a hearing aid, be persuaded? Give the strongest argument on both sides.

lighthouse crew :: Plan shifts for a lighthouse crew of three so that someone is always awake, nobody works more than nine hours, and all
eat dinner together.
""",
    "maths": """
turnstile :: A turnstile lets 14 people through per minute. A stadium has 9 of them and expects 17,640 visitors. How long before kick-off
must the gates open?

Bronwen :: Bronwen is 6 years older than Cosmo, and in 9 years their ages will add up to 60. How old is each?

skyscraper :: A skyscraper has 63 floors of 3.4 m each. How tall is it, and how long does a lift need at 6 m/s?

cuboid :: A cuboid has edges in the ratio 1:2:3 and a volume of 1296 cubic centimetres. Find the edges.

raisins :: A bag contains 3/8 raisins, 1/4 nuts, and the remaining 270 g is dried mango. How heavy is the bag?

trapezium :: What is the area of a trapezium with parallel sides of 11 cm and 7 cm and a height of 4 cm?

719 :: Is 719 divisible by 7, 11 or 13? Do it without a calculator.

pirate crew :: A pirate crew of 7 shares 500 doubloons; the captain takes a fifth first. How many does each sailor get and how many are
thrown overboard?

spinner :: A spinner has five equal sectors numbered 1 to 5. It is spun twice. What is the chance that the product is odd?

kinetic sculpture :: One arm of a kinetic sculpture turns every 42 seconds, the other every 30. Both point up now. When is the next time?

y-intercept :: A line passes through (-2, 9) and (4, -3). Find its slope and its y-intercept.

telescoping :: Add 1/(1*2) + 1/(2*3) + 1/(3*4) + ... + 1/(9*10) with a telescoping trick.

commission :: A seller earns 1,350 a month plus 3.5% commission. Last month she took home 2,015. For how much did she sell?

polygon with 15 sides :: What is the sum of the inner angles of a polygon with 15 sides?

hourglass :: With one 4-minute and one 7-minute hourglass, how do I measure exactly 9 minutes?

ferris wheel :: A Ferris wheel with a radius of 22 m turns once in 8 minutes. How fast does a cabin move, in metres per second?

geometric mean :: What is the geometric mean of 4 and 49, and what can one see in it?

ounces :: A parcel may weigh 70 ounces. Each book weighs 13 ounces and the box 5. How many books fit?
""",
    "code": """
parking meter :: Write a Python class for a parking meter with coins, time left and change. Keep it under 40 lines.

Morse :: Write a JavaScript function that turns a sentence into Morse code and back.

barometer.csv :: Write a shell pipeline that prints the lowest and the highest value in the second column of barometer.csv.

pangram :: python: check if a sentence is a pangram

leaderboard :: SQL: from leaderboard(player, level, score, played_at), get each player's best score per level, and the date of it.

Pascal's triangle :: Print the first n rows of Pascal's triangle in C. Explain the loop bounds.

debounce :: What does "debounce" mean in front-end code? Show a small implementation in TypeScript.

knight moves :: Write a function that returns all legal knight moves from a square such as "e4".

ring buffer :: Implement a ring buffer in Rust with push and pop, and say what happens when it is full.

monotonic :: Write a Go function that tells if a slice is monotonic, plus a table test.

git bisect :: How do I use git bisect to find the commit that broke a test? Give the commands in order.

luhn :: Here is my code, it always returns False. Why?
[]```python[]def luhn(s):[]    t = 0[]    for i, c in enumerate(s):
[]        d = int(c)[]        if i % 2 == 0: d *= 2[]        t += d[]    return t % 10 == 0[]```

strtok :: Is this use of strtok safe if two threads call it?[][]char *first(char *line) {[]    return strtok(line, ",");[]}

sprite :: Write the update step for a sprite that jumps: position, velocity, ground at y = 0. Any language.

mail merge :: Write a Python script for a mail merge: a template with $name and $amount, a CSV of receivers, one text file each.

idempotent :: What does it mean that a request is idempotent? Which HTTP verbs should be?

matplotlib :: Write matplotlib code for a bar chart with error bars, labels and a grid behind the bars.
""",
    "role_play": """
auctioneer :: You are an auctioneer. I bring you a teapot without a lid. Sell it.

beekeeper :: Act as a beekeeper who talks about her hives as if they were kingdoms. I ask how the winter was.

lollipop lady :: You're a lollipop lady in front of a school. It is Friday and I drive a very loud car. Talk to me.

chess grandmaster :: Be a chess grandmaster who has just lost to a child. Answer the reporters.

gargoyle :: You are a gargoyle on an old roof. Tell me what you saw last night.

sommelier :: Play a sommelier in a restaurant that only serves tap water. I would like a recommendation.

submarine commander :: We are in a submarine commander's mess; you are the commander, I am the new cook. The fish is gone. Stay calm.

piano mover :: Pretend to be a piano mover halfway up the stairs. I am your partner and I need to sneeze.

tax inspector :: You are a tax inspector with a soft heart. My receipts are in a shoebox. Begin.

ice sculpture :: Stay in character as an ice sculpture in the last week of February. Reply to my invitation to a barbecue.

cryptographer :: You are a cryptographer from 1941. I show you my phone. What do you ask first?

wedding planner :: Let's role play: you are a wedding planner, I am the groom's mother, and the cake is the wrong colour.

crane operator :: Speak as a crane operator who sees the whole town from above. Describe your day in under 80 words.

toothbrush :: You're my toothbrush, and you have complaints. Go.

swordfish :: Dialogue, please: a swordfish and an umbrella meet at the bottom of the sea.

lost-property :: You work at a lost-property desk. I claim that the skeleton is mine.

dungeon master :: Be my dungeon master. I am a dwarf with a lantern and a bad knee, standing before a green door. Describe what I see and
give me three choices.
""",
}


def held_out_prompts() -> list[tuple[str, str, str]]:
    """(category, key word, prompt) of every held-out chat prompt."""
    out = []
    for category, text in HELD_OUT.items():
        for entry in paragraphs(text, keep_spaces=True):
            key, prompt = entry.split(" :: ", 1)
            out.append((category, key, prompt.replace(" []", "[]").replace("[]", "\n")))
    return out
