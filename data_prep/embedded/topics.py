"""Topics of the training prompts, by field. Each is a noun phrase that fits after "about". The held-out prompts use none of them."""

from data_prep.embedded.deck import items

TOPICS: dict[str, list[str]] = {
    "history": items("""
    the building of the pyramids; the fall of the Roman Empire; the Silk Road; Viking sea voyages; the Black Death; the printing press;
    the French Revolution; the Ottoman Empire; the Inca road system; samurai in feudal Japan; the Great Fire of London; the Cold War;
    the Berlin Wall; the Apollo programme; the abolition of slavery; the women's suffrage movement; the Gold Rush in California;
    the Magna Carta; ancient Athens; the Mongol conquests; the Spanish Armada; the Age of Exploration; the Industrial Revolution;
    daily life in a medieval castle; the Great Depression; the Suez Canal; the Library of Alexandria; the Phoenician alphabet;
    the Aztec capital Tenochtitlan; the Hanseatic League; the Boston Tea Party; the Meiji Restoration; the Mali Empire under Mansa Musa;
    the Congress of Vienna; the invention of the telegraph; the partition of India; trench warfare in the First World War;
    the Marshall Plan; Hammurabi's laws; the Terracotta Army
    """),
    "physics and chemistry": items("""
    gravity; friction; static electricity; magnets; radio waves; the speed of light; black holes; nuclear fusion; superconductors;
    semiconductors; the periodic table; acids and bases; rust; combustion; crystals; noble gases; batteries; catalysts; entropy;
    sound waves; lenses and mirrors; rainbows; the greenhouse effect; buoyancy; surface tension; lasers; radioactivity; X-rays;
    the Doppler effect; polymers; soap and detergents; fireworks colours; absolute zero; pendulums; gyroscopes; quantum tunnelling;
    dark matter; the ozone layer; distillation; isotopes
    """),
    "biology": items("""
    photosynthesis; DNA replication; the human heart; blood types; vaccines; viruses; bacteria in the gut; enzymes; mitosis;
    evolution by natural selection; camouflage in animals; animal migration; hibernation; pollination; stem cells; the nervous system;
    muscle growth; colour vision; the sense of smell; fermentation; fungi and mycelium; mosses; carnivorous plants; coral reefs; symbiosis;
    parasites; food chains; invasive species; bird song; echolocation in bats; ant colonies; octopus intelligence; whale communication;
    spider silk; metamorphosis of butterflies; tree rings; seed dispersal; dinosaurs; fossils; mutation
    """),
    "space": items("""
    the moons of Jupiter; Saturn's rings; life on Mars; comets; asteroids; solar eclipses; the phases of the Moon; neutron stars;
    the Milky Way; the International Space Station; space telescopes; rocket engines; satellites; space debris; meteor showers;
    the northern lights; sunspots; exoplanets; the Big Bang; time dilation; spacesuits; growing food in orbit; the Kuiper belt;
    constellations; supernovae
    """),
    "technology": items("""
    electric cars; smartphones; cloud computing; machine learning; neural networks; search engines; email spam filters; Bluetooth;
    Wi-Fi routers; GPS navigation; 3D printing; drones; virtual reality; touch screens; solid-state drives; open-source software;
    password managers; two-factor authentication; QR codes; barcode scanners; digital cameras; streaming video; voice assistants;
    robots in warehouses; self-driving buses; smart thermostats; heat pumps; wind turbines; solar panels; hydrogen fuel;
    undersea internet cables; computer viruses; data backups; encryption; web browsers; recommendation systems; chatbots; electronic paper;
    noise-cancelling headphones; contactless payment; blockchain; quantum computers; microchips; mechanical keyboards
    """),
    "cooking": items("""
    sourdough bread; tomato soup; scrambled eggs; fried rice; lentil stew; chicken curry; apple pie; pancakes; home-made pasta;
    pizza dough; roast vegetables; hummus; guacamole; miso soup; dumplings; paella; risotto; tacos; pickled cucumbers; yoghurt;
    chocolate cake; oatmeal cookies; fruit salad; vegetable stock; grilled fish; baked potatoes; stir-fried noodles; French onion soup;
    falafel; banana bread; iced tea; strong coffee; home-made jam; salad dressing; mushroom sauce; meal planning for a week;
    cooking for one; knife skills; cast-iron pans; spices from South Asia; kimchi; gluten-free baking; school lunch boxes; picnic food;
    leftovers; breakfast smoothies; slow cookers; barbecue; vegan desserts; cheese boards
    """),
    "travel": items("""
    a weekend in Lisbon; backpacking in Vietnam; a road trip through Iceland; the temples of Kyoto; street food in Bangkok;
    hiking in the Dolomites; a night train to Vienna; the souks of Marrakech; a safari in Kenya; island hopping in Greece;
    a cruise along the Norwegian coast; Machu Picchu; Venice in winter; cycling in the Netherlands; camping with children;
    packing a small suitcase; jet lag; cheap flights; travel insurance; learning a few phrases before a trip; travelling alone;
    travelling with a dog; youth hostels; airport delays; a first trip to New York; the Trans-Siberian railway; the Great Barrier Reef;
    Buenos Aires and tango; winter in Quebec; Cape Town; Petra in Jordan; a honeymoon in Bali; museums in Paris; Scottish castles;
    the Grand Canyon; Istanbul; Mexico City; Prague on a budget; Singapore; the Baltic coast
    """),
    "sport": items("""
    football tactics; basketball free throws; swimming technique; long-distance running; yoga for beginners; rock climbing; table tennis;
    tennis serves; cricket rules; rugby scrums; ice hockey; figure skating; skiing for the first time; snowboarding; surfing; rowing;
    sailing; archery; fencing; judo; boxing training; gymnastics; road cycling; mountain biking; horse riding; badminton; volleyball;
    golf putting; baseball; the Olympic Games; sports injuries; warming up before exercise; strength training at home; skateboarding;
    martial arts for children; team spirit; fair play; refereeing; sports nutrition; orienteering
    """),
    "health": items("""
    sleeping well; drinking enough water; stress at work; back pain; headaches; high blood pressure; diabetes; asthma; hay fever;
    the common cold; washing hands; first aid for burns; sunburn; healthy breakfasts; vitamins; protein in the diet; sugar; fasting;
    meditation; breathing exercises; anxiety before exams; burnout; eye strain; posture; dental care; hearing loss; allergies to nuts;
    food poisoning; walking every day; giving up smoking; caffeine; screen time; healthy ageing; physiotherapy; blood donation;
    sprained ankles; insomnia; motion sickness; nutrition labels; growing pains
    """),
    "work": items("""
    job interviews; writing a CV; asking for a raise; remote work; open-plan offices; long meetings; giving feedback; time management;
    procrastination; team building; onboarding new colleagues; conflict between colleagues; public speaking; networking; freelancing;
    starting a small business; customer service; project deadlines; email overload; mentoring; career changes; internships; night shifts;
    work uniforms; leadership; delegation; performance reviews; saying no politely; burnout prevention in teams; a four-day week;
    trade unions; retirement planning; business travel; minutes of a meeting; presentations with slides; working with difficult clients;
    hiring; apprenticeships
    """),
    "money": items("""
    saving for a house; compound interest; credit cards; student loans; mortgages; inflation; the stock market; index funds; pocket money;
    household budgets; taxes for freelancers; pensions; emergency funds; bank fees; currency exchange; insurance; online shopping;
    second-hand clothes; bargaining at a market; impulse buying; rent increases; energy bills; crowdfunding; invoices;
    tipping in restaurants; supply and demand; central banks; import tariffs; minimum wage; cash versus cards; buying a used car;
    subscriptions; charity donations
    """),
    "law and society": items("""
    copyright; privacy rights; tenants' rights; consumer refunds; traffic fines; jury trials; the separation of powers; elections;
    referendums; freedom of speech; local government; public libraries; school uniforms; compulsory voting; immigration; census taking;
    citizenship tests; volunteer work; neighbourhood watch; public transport; cycle lanes; recycling; plastic bags; noise complaints;
    patents; trade marks; wills and inheritance; small claims courts; child labour laws; animal welfare; food safety rules;
    museums with free entry; the United Nations; human rights; disability access; urban planning; affordable housing; community gardens;
    street art; social media rules
    """),
    "family and friends": items("""
    raising twins; a new baby; teenagers and phones; grandparents; sibling rivalry; a family reunion; moving in together; weddings;
    anniversaries; birthday parties; adoption; divorce; caring for an elderly parent; bedtime stories; homework; potty training;
    picky eaters; long-distance friendship; making friends as an adult; apologising; jealousy; keeping a secret; a first date;
    breaking up kindly; housemates; neighbours; godparents; family traditions; board game nights; pen pals; choosing a name;
    a best friend moving away; empty nest; step-parents; school bullying; shy children; gratitude; forgiveness
    """),
    "arts": items("""
    impressionist painting; watercolours; oil portraits; sculpture in marble; street photography; film noir; silent films; animation;
    comic books; opera; jazz; blues guitar; hip-hop; the violin; learning the piano; drum circles; choir singing; ballet; folk dance;
    theatre rehearsals; stage fright; puppetry; pottery; knitting; quilting; calligraphy; graphic design; architecture of cathedrals;
    modern architecture; haiku; sonnets; detective novels; science fiction; fairy tales; mythology; biographies; book clubs; poetry slams;
    museum curators; film music; costume design; improvisation; stained glass; mosaics; woodcuts
    """),
    "geography": items("""
    the Sahara; the Amazon rainforest; the Nile; the Himalayas; the Mediterranean Sea; the Pacific Ring of Fire; Antarctica; the Arctic;
    monsoon rains; earthquakes; volcanoes; tsunamis; river deltas; deserts; the tundra; savannas; mangroves; peat bogs; caves; waterfalls;
    time zones; map projections; latitude and longitude; continental drift; the Dead Sea; the Alps; the Great Plains; megacities;
    island nations; borders; population growth; the Panama Canal; lakes in Africa; fjords; hot springs; sea level rise; droughts; floods
    """),
    "nature and animals": items("""
    foxes in cities; hedgehogs; owls; penguins; elephants; wolves; bears; dolphins; sharks; sea turtles; frogs; snakes; honey bees;
    ladybirds; earthworms; squirrels; crows; swans; hummingbirds; cats; puppies; guinea pigs; goldfish; horses; donkeys; goats;
    chickens in the garden; dairy cows; sheep dogs; parrots; oak trees; pine forests; cherry blossom; sunflowers; roses; cacti; mushrooms;
    wild flowers; autumn leaves; the first snow; thunderstorms; fog; morning dew; tides; starlings; beavers; otters; moths; dragonflies;
    seaweed
    """),
    "home and garden": items("""
    compost; raised beds; tomato plants; house plants; pruning fruit trees; lawns; watering cans; garden tools; weeds;
    greenhouse gardening; balcony herbs; painting a room; leaky taps; squeaky doors; wallpaper; wooden floors; insulation;
    mould in the bathroom; spring cleaning; laundry stains; ironing shirts; moving house; small kitchens; bookshelves; home offices;
    garage sales; sewing on a button; fixing a bicycle puncture; smoke alarms; energy-saving bulbs; curtains; decluttering;
    furniture assembly; keeping bees away from the table; garden ponds; bird feeders; rain barrels; candles
    """),
    "education": items("""
    learning a language; mental arithmetic; note-taking; flash cards; reading aloud; spelling; essay writing; science fairs; school trips;
    exam nerves; online courses; group projects; home schooling; kindergarten; university life; student housing; scholarships; gap years;
    handwriting; plagiarism; peer review; critical thinking; debate clubs; geography lessons; chemistry experiments in class;
    teaching fractions; teaching children to code; learning to read music; dyslexia; libraries at night; lifelong learning; curiosity;
    mistakes as teachers; foreign exchange students
    """),
    "philosophy and mind": items("""
    free will; happiness; boredom; loneliness; courage; honesty; white lies; justice; beauty; memory; dreams; habits; nostalgia;
    fear of the dark; the fear of failure; creativity; intuition; optimism; stoicism; utilitarianism; the trolley problem;
    the ship of Theseus; consciousness; artificial intelligence and ethics; personal identity; time; luck; silence; patience; ambition;
    envy; kindness to strangers; confirmation bias; the placebo effect; first impressions; perfectionism; peer pressure; humour; wisdom;
    the meaning of home
    """),
    "objects and everyday life": items("""
    umbrellas; zips; pencils; paper clips; mirrors; clocks; bicycles; shoes; eyeglasses; keys; coins; postage stamps; matches;
    refrigerators; microwave ovens; lifts; escalators; traffic lights; bridges; tunnels; sewing machines; vending machines; playing cards;
    dice; jigsaw puzzles; crossword puzzles; tattoos; perfume; hats; backpacks; alarm clocks; public benches; bakeries; hairdressers;
    flea markets; a song stuck in the head; Monday mornings; rainy Sundays; waiting rooms; queues; lost luggage; old photographs;
    a broken phone; a missed bus; a power cut; a surprise parcel
    """),
}

CITIES = items("""
    Lisbon; Nairobi; Toronto; Hanoi; Lima; Oslo; Seville; Kraków; Osaka; Melbourne; Chicago; Dublin; Athens; Cairo; Mumbai; Santiago;
    Helsinki; Naples; Lyon; Hamburg; Ghent; Porto; Tallinn; Zagreb; Bogotá; Montreal; Seattle; Denver; Boston; Auckland; Seoul; Taipei;
    Manila; Jakarta; Accra; Dakar; Tunis; Beirut; Tbilisi; Riga; Bergen; Gothenburg; Leeds; Glasgow; Cardiff; Valencia; Turin; Basel;
    Salzburg; Brno
    """)

COUNTRIES = items("""
    Portugal; Norway; Brazil; Canada; Japan; India; Egypt; Kenya; Mexico; Argentina; Chile; Peru; Spain; Italy; Greece; Turkey; Poland;
    Sweden; Finland; Ireland; Austria; Switzerland; Hungary; Romania; Morocco; Ghana; Nigeria; Ethiopia; Thailand; Vietnam; Indonesia;
    Philippines; South Korea; China; Mongolia; Nepal; Pakistan; Iran; Jordan; Cuba; Colombia; Bolivia; Australia; New Zealand; Madagascar
    """)

FOODS = items("""
    rice; potatoes; spinach; chickpeas; eggs; salmon; tofu; mushrooms; carrots; aubergines; pumpkin; cauliflower; red cabbage; green beans;
    black beans; sweetcorn; peas; oats; barley; quinoa; apples; pears; plums; lemons; strawberries; walnuts; almonds; coconut milk; feta;
    mozzarella; chicken thighs; minced beef; prawns; tuna; ginger; garlic; basil; coriander; cinnamon; paprika; honey; yoghurt;
    stale bread; pasta
    """)

ANIMALS = items("""
    fox; rabbit; tortoise; crow; hedgehog; whale; goat; cat; mouse; lion; elephant; penguin; owl; parrot; frog; bear; wolf; horse; donkey;
    squirrel; spider; ant; bee; dolphin; crab; seal; camel; giraffe; zebra; badger
    """)

FIRST_NAMES = items("""
    Anna; Ben; Clara; David; Elena; Farid; Grace; Hugo; Ines; Jonas; Kira; Leo; Mira; Nadia; Oscar; Priya; Quentin; Rosa; Samir; Tara;
    Umar; Vera; Wendell; Ximena; Yusuf; Zoe; Akira; Beatriz; Carlos; Dina; Emil; Fatima; Goran; Hana; Ivan; Julia; Kofi; Lucia; Mateo;
    Nora; Omar; Paula; Rafael; Sofia; Tomas; Ursula; Viktor; Willa; Yara; Zain
    """)

SURNAMES = items("""
    Abara; Bellweather; Castellan; Drummer; Eastlake; Farrow; Greenhill; Hallorin; Iversen; Jansky; Kessling; Lindqvar; Moreau; Norwick;
    Okonedo; Pellar; Quillan; Rostov; Santoro; Tennfield; Umbrose; Vasko; Wrenford; Yilmar; Zeller; Ashgrove; Brandt; Corliss; Delacour;
    Ekström
    """)

ALL_TOPICS = [topic for field in TOPICS.values() for topic in field]
