"""Short original passages and sentences: what the rewriting prompts (and some extraction prompts) work on."""

from data_prep.embedded.deck import items, paragraphs

PASSAGES = paragraphs("""
The market in the old harbour opens before the sun is up. By five o'clock the fishermen have stacked their crates, and the first cooks
arrive with wet boots and long lists. Nobody talks much. By nine the best fish is gone, the gulls have lost interest, and the square
smells of salt and lemon soap.

Our school has decided to replace the printed timetable with a screen in the entrance hall. Some teachers like the idea because changes
can be shown at once. Others worry that pupils will crowd around the screen in the morning. The head teacher wants to test it for one
month before spending more money.

Cork comes from the bark of an oak that grows around the western Mediterranean. The bark is peeled by hand every nine years, and the
tree is not harmed. Because the cells of cork are filled with air, the material is light, floats well and keeps heat in. It is used for
stoppers, floors and even shoes.

I bought this kettle in March and used it every day. It boils quickly and the handle stays cool, which I like. However, the lid became
loose after two months, and last week it fell into my cup. The shop offered a repair but not a refund. I would not buy it again.

When the river rose on Thursday night, the people of the lower town carried their furniture to the upper floors. A baker kept his oven
going and handed out warm rolls to the volunteers who filled sandbags. In the morning the water stopped a hand's width below the bridge.
The bridge is two hundred years old.

Working from home saves me ninety minutes of travel each day, and I can concentrate better in the morning. On the other hand, I miss the
short talks in the corridor, and sometimes I am still at my desk at eight in the evening. I now close the laptop at six and go for a
walk, whatever happens.

The council plans to turn the unused railway line into a path for walkers and cyclists. The path would be eleven kilometres long and
connect four villages. Farmers fear that visitors will leave gates open. Shop owners hope for new customers. A decision is expected in
the autumn.

To make the soup, soften two chopped leeks in butter, add three diced potatoes and a litre of stock, and simmer for twenty minutes.
Blend half of it and stir it back, so that the soup is creamy but still has pieces. Finish with nutmeg, black pepper and a handful of
parsley. It serves four.

Many people think that camels store water in their humps. In fact the humps are made of fat, which the animal uses as a reserve when
food is scarce. Camels save water in other ways: they sweat little, their kidneys are very efficient, and they can drink more than a
hundred litres within minutes.

The new sports hall has a wooden floor, seats for six hundred people and a roof covered with solar cells. It cost more than planned
because the ground was softer than the engineers had expected. The first match was played in front of a full house, although the showers
had no hot water yet.

My grandfather repaired radios in a room no larger than a wardrobe. He kept screws in jam jars and could tell by the smell which part
had burnt. Children came to watch him, and he let them turn the big dial until a voice from another country filled the room. He never
charged pensioners.

Paper can be recycled about six times before its fibres become too short. Each time, the paper is soaked, stirred into a pulp, cleaned
of staples and ink, and pressed again. Fresh fibres are added to keep the sheet strong. Greasy pizza boxes are a problem, because oil
and water do not mix.

The meeting started ten minutes late since nobody had the key. We agreed on a budget of four thousand for the summer festival and on
blue as the colour of the posters. Who will book the band is still open. The next meeting is on the second Wednesday of the month, and
somebody should bring biscuits.

Ice forms first at the edge of a lake, where the water is shallow and still. As it thickens it makes sounds: cracks, groans and long
notes like a plucked wire. Clear ice is stronger than white ice, which holds bubbles and snow. Local people test it with an axe before
they let children skate.

Our hotel was close to the beach, as promised, but a building site lay between the two. Work began at seven each morning. The staff were
friendly and moved us to a room at the back, where it was quieter. Breakfast was excellent, above all the figs. We would return in
another year.

The translator's job is invisible when it is done well. She has to decide whether a joke should be explained, replaced or given up.
Names that mean something in one language are only sounds in another. She reads each page aloud, because the ear notices a false step
that the eye forgives.

A start-up in our town collects old bread from bakeries and turns it into beer. The bread replaces about a third of the malt. According
to the founders, each bottle saves one slice from the bin. The beer is sold in twelve cafés, and the first batch was gone within a
fortnight.

When bees find a good meadow, they return to the hive and dance. The direction of the dance shows the angle to the sun, and its length
tells the distance. Other bees follow in the dark by touch. Nobody has taught them; the dance is inborn, though young bees improve with
practice.

The lift in building C has been out of service since Sunday. A spare part has to be ordered from abroad and will take eight working
days. Residents who need help with heavy shopping can call the caretaker between nine and noon. We apologise for the trouble and will
credit part of the service charge.

Learning to play an instrument as an adult is harder than learning as a child, but not for the reason most people give. The fingers
adapt well enough. What is missing is time, and the patience to sound bad. Ten minutes every day do more than two hours on Sunday.

The old cinema had red seats, a ceiling painted with stars and a projector that broke down twice a year. On those evenings the owner
went on stage and told the rest of the film from memory. People said his endings were better. The building is a supermarket now, but the
stars are still there.

Desert foxes have large ears, and not only for hearing. Blood flows through the thin skin of the ears and gives off heat, which keeps
the animal cool. Thick fur on the soles of its feet protects it from hot sand. During the day it sleeps in a burrow and hunts after
sunset.

Our team tested the app with thirty users. Twenty-two of them found the search field at once, five after a hint, and three not at all.
Most complaints concerned the small type on the payment page. We propose a larger font, one button instead of three, and a second test
in October.

It is often said that breakfast is the most important meal of the day. The evidence is mixed. Some studies find that people who eat in
the morning weigh less, but they also tend to exercise more. What seems clear is that a sugary breakfast makes one hungry again by
eleven.

The train stopped in the middle of a field of sunflowers. After twenty minutes the conductor walked through and said that a cow was
lying on the track and did not wish to get up. A woman opened a basket and shared plums with everybody. When the train moved again, some
people were sorry.

Glass is made by melting sand with soda and lime at about fifteen hundred degrees. Soda lowers the melting point; lime keeps the glass
from dissolving in water. A little iron makes it green, which is why cheap bottles have that colour. Window glass is poured onto liquid
tin to become perfectly flat.

Dear neighbours, on Saturday my daughter turns eighteen and we will celebrate in the courtyard. There will be music until eleven. If the
noise bothers you, please ring the bell and I will turn it down, or better, come and have a piece of cake. The bicycles should be moved
by Friday evening.

Before refrigerators, ice was a trade. In winter, men sawed blocks from frozen lakes, packed them in sawdust and stored them in
thick-walled houses. Ships carried the ice to hot countries, and about half of it arrived. A glass of cold lemonade in July was a sign
of wealth.

The survey shows that most members want longer opening hours on weekdays, while only a few asked for a new climbing wall. Parents wish
for a corner where small children can play. Almost everybody complained about the parking. The board will present a plan and its price
at the spring assembly.

She started the bakery with one oven and a borrowed bicycle. In the first winter she sold forty loaves a day and slept four hours a
night. Then a hotel ordered rolls, and another followed. Today nineteen people work for her. She still shapes the first loaf of every
morning herself.

A glass of water spilled over the keyboard on Monday. I turned the laptop upside down, took out the battery and left it to dry for two
days. Now it starts, but the letters E and R do not work. I have a backup of all files except the last report, which is due tomorrow.

Mountain weather changes fast. A blue morning may end in hail by two o'clock, and fog can hide a path within minutes. Guides advise an
early start, warm clothes even in August, and a clear time at which to turn back. Most accidents happen on the way down, when people are
tired.

Second-hand shops have become popular among young people. They like the low prices and the feeling of finding something that nobody else
has. Critics point out that cheap second-hand clothes can lead people to buy more than they need. The shops answer that each reused
jacket is one less to be sewn.

The theatre group rehearses in the gym on Tuesdays and Fridays. This year it will perform a comedy about a stolen cheese. Two roles are
not yet cast: the deaf butler and the second policeman. Experience is not needed, but a loud voice helps. The first night is on the
twentieth of May.
""")

SENTENCES = items(
    """
    The results of the test was not as good then we hoped. | Me and him goes to the gym every tuesday.
    Due to the fact that it was raining, we made the decision to cancel the game. | She dont want no sugar in her tea.
    At this point in time we are not in a position to give you an answer. | The dog which was barking it was very big.
    Gimme the file asap. | Your invoice is wrong again, fix it. | I can't come tomorrow, sorry. | The meeting was boring and way too long.
    This product is garbage and I want my money back. | Hey, can you cover my shift on Sunday?
    We hereby inform you that your application has been received and shall be processed in due course.
    The implementation of the new system was carried out by the team. | Mistakes were made.
    The cake was eaten by the children before the guests had arrived. | A decision about the roof will be made by the committee next week.
    The old man walked slowly down the street. | It was a nice day and we did nice things. | The food was good.
    He is very very tired and he is also very hungry. | There is a lot of people who thinks that cats is better then dogs.
    I seen that movie two times already. | Their going to there house over they're.
    The company, who was founded in 1987, have three office. | Its important that the cat gets it's food.
    If I would have known, I would have came earlier. | In my opinion I think that we should probably maybe start soon.
    The reason why I am late is because of the bus was late.
    Please do not hesitate to contact us should you require any further assistance whatsoever. | I literally died when I saw the bill.
    We need to leverage our synergies to move the needle going forward. | The aforementioned tenant shall vacate the premises forthwith.
    Utilise the lever in order to facilitate the opening of the hatch. | The patient presented with acute cephalalgia.
    Precipitation is anticipated in the latter part of the afternoon.
    My holiday was great. The sea was warm. The people were friendly. The food was cheap. I want to go back.
    The lamp fell. The cat ran away. Nobody was hurt. | She opened the letter. She read it. She sat down. She said nothing.
    The shop is closed on Mondays. It is open on all other days. It closes at six.
    All men should wash their hands before leaving the kitchen. | The chairman will give his speech after lunch.
    Every student must bring his own laptop. | The early bird catches the worm. | Time flies like an arrow.
    Better a sparrow in the hand than a pigeon on the roof. | Too many cooks spoil the broth.
    Sales went up by 12% in the second quarter, mainly because of the hot weather.
    The bridge will be closed from 4 to 9 May. Drivers should use the northern road.
    Our app now starts twice as fast and uses less battery. | Children under six travel free when accompanied by an adult.
    Only items in their original packaging can be returned. | The kids had a blast at the zoo. | That exam was a piece of cake.
    He kicked the bucket last winter. | I'm feeling under the weather today. | Let's call it a day.
    The boss hit the roof when he saw the numbers. | She let the cat out of the bag about the party. | We're all in the same boat.
    """,
    "|",
)

REWRITE_TEXT = items(
    """
    Rewrite this text in simpler words: | Shorten the following text to one sentence: | Summarise this in two sentences:
    Make this text sound more formal: | Rewrite the text below in a friendly, informal tone: | Turn this text into bullet points:
    Rewrite this passage in the first person: | Rewrite the following in the present tense:
    Give this text a catchy title and explain your choice: | Rewrite the passage for a ten-year-old: | Turn this into a short poem:
    Make this more exciting: | Rewrite this as a news report: | Turn the text into a dialogue between two people:
    Rewrite the text as a letter to a friend: | Change the tone of this text to humorous: | Rewrite this text using short sentences only:
    Combine the sentences of this text so that it flows better: | Rewrite the passage so that it sounds more polite:
    Paraphrase the text without losing any fact: | Rewrite this text from the point of view of an outsider:
    Turn this text into a list of questions and answers: | Cut this text to about half its length:
    Expand this text with two or three vivid details: | Rewrite the text as an advertisement:
    Write a tweet that says the same as this text: | Rewrite the following in the future tense: | Turn this into a set of instructions:
    Rewrite this as a diary entry: | tl;dr please: | Rewrite in British English with a slightly old-fashioned style:
    Edit the text for clarity and tell me what you changed: | Translate this text into plain language for someone learning English:
    Write a summary headline and a one-line subtitle for this text: | Rewrite this passage as if it had happened a hundred years ago:
    Continue the text with three more sentences in the same style: | Rewrite the text with a pessimistic mood:
    """,
    "|",
)

REWRITE_SENTENCE = items(
    """
    Correct the grammar: "{s}" | Rewrite this sentence so that it is clearer: "{s}" | Make this more polite: "{s}"
    Give me three different ways to say this: "{s}" | Rewrite in a formal style: "{s}" | Rewrite in casual English: "{s}"
    Say this in fewer words: "{s}" | Make this sound more dramatic: "{s}" | Turn this into a question: "{s}"
    Rewrite it as a friendly text message: "{s}" | Put this into the past perfect or explain why it can't be done: "{s}"
    fix this pls: {s} | How would a poet say this? "{s}" | Change it so that it sounds less harsh: "{s}"
    Explain what is wrong or weak in this text and improve it: "{s}" | Rewrite it for a legal document: "{s}"
    Rewrite it for a children's book: "{s}" | Say the opposite of this: "{s}" | Paraphrase: {s}
    Rewrite it in the style of a sports commentator: "{s}" | Improve the word choice: "{s}"
    Proofread the following and return only the corrected version. {s} | Is this good English? If not, correct it. "{s}"
    Rewrite this as a headline: "{s}" | Add more detail to this: "{s}" | Turn it into a rhyme: "{s}"
    I want to put this into an email. Make it sound professional: "{s}"
    Rewrite it without using the letter "z" and without any idiom: "{s}"
    """,
    "|",
)

# Questions that fit any of the passages above.
PASSAGE_QUESTIONS = items(
    """
    List all numbers in this text and say what each one stands for. | Extract every place or building mentioned.
    Which people or groups appear in the text? | Pull out the three most important facts as bullet points.
    What is the main idea, and which sentence shows it best? | List all nouns in the second sentence.
    Which advantages and which disadvantages are mentioned? | Make a list of the verbs in the first sentence.
    What problem does the text describe, if any? | Quote the sentence that surprised you most. | Find all words for times or dates.
    Extract the cause and the effect described here. | Give five keywords for this text.
    Which claims in the text are facts and which are opinions? | List every material, food or animal in the text.
    What does the text say at the very end? | Write the key information as JSON with the keys "topic", "facts" and "mood".
    List all adjectives you can find. | Who does what? Make a table with the columns "who" and "what".
    What is not mentioned in the text but would be good to know? | How many sentences does the text have, and what is each one about?
    """,
    "|",
)
