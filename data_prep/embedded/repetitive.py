"""Held-out prompts whose answer repeats most of the prompt: small edits of a text, lines picked from a list, small changes of code.

Prompt lookup (n-gram and suffix decoding) should win here; the chat prompts show where it does not.
"""

from data_prep.embedded.deck import paragraphs

# A text, then two edits of it that leave most words as they are.
TEXTS = paragraphs("""
The Wexcombe allotment society meets on the first Tuesday of every month in the scout hut on Tanner Row. New tenants receive plot number,
gate code and a copy of the rules. Plots that stay unused for twelve weeks go back to the society. Hoses must be rolled up after use.
Bonfires are allowed only in November.
|| Change every "Tuesday" to "Friday" and "twelve" to "eight", and repeat the rest of the text exactly.
|| Repeat this text word for word, but write the numbers as digits.

To reset the Halberd 300 dehumidifier, switch it off at the wall and wait two minutes. Hold the button marked DRAIN while you switch it on
again. When the lamp turns amber, release the button. Empty the tank, wipe the float, and slide the tank back until it clicks. If the lamp
stays amber, repeat the procedure.
|| Copy the text and replace "lamp" by "indicator light" everywhere.
|| Turn this into a numbered list, one step per line, with the wording unchanged.

The tenants agree to keep the terrace free of snow, to air the rooms daily, and to report any damage within three days. The landlady
agrees to service the boiler every September, to repair what wears out in normal use, and to enter the flat only after notice of one day.
Both sides agree to settle quarrels by talking first.
|| Rewrite this text with "landlady" changed to "owner" and "tenants" to "residents". Change nothing else.
|| Correct spelling if needed and print the whole text again. Then add one sentence about bicycles at the end.

Once there was a cobbler who owned one chair, one hammer and one goose. The goose slept on the chair, so the cobbler stood. One evening a
stranger knocked and asked for a chair to rest on. The cobbler looked at the goose, the goose looked at the stranger, and the stranger,
who knew geese, said that standing was fine.
|| Tell the same story again word by word, but with a "cat" in place of the goose.
|| Put the story into the present tense and keep all other words.

Passengers are reminded that the tramway to Ellerholm closes at half past ten tonight for work on the overhead wires. The last car leaves
Quay Street at 22:12. After that, buses marked with a red dot replace the trams and stop at the same places. Tickets remain valid. The
first tram tomorrow runs at 5:20 as usual.
|| Repeat the announcement with all times moved one hour later.
|| Copy this announcement, but end every sentence with an exclamation mark.

Dear Professor Adeyinka-Holt, thank you for the invitation to speak at the symposium on tide mills. I would be glad to come. My talk would
last forty minutes and needs a projector. I travel by train and will arrive on the evening before. Could you tell me where the speakers
stay? With kind regards, Tilda Marchetti
|| Keep the letter, but change the length of the talk to twenty-five minutes and the projector to a blackboard.
|| Write out the letter again with every "I" replaced by "we" and the verbs made to fit.

Day 1: climb to the Vrata hut, 900 metres up, soup and early bed. Day 2: cross the saddle before noon, then down the scree to the lake.
Day 3: rest, wash socks, mend the tent. Day 4: long walk along the ridge, water only at the spring below the cross. Day 5: down to the
valley, cake at the station, train at 16:44.
|| Repeat the plan without day 3 and renumber the days.
|| Write each day on its own line; do not change the words.

The quick summary of our trial: of 64 seedlings, 51 survived the frost, 9 lost their tips, and 4 died. The seedlings under fleece grew 6
cm, those under glass 11 cm, those in the open 2 cm. Slugs ate three labels. We will repeat the trial in March with 96 seedlings, the same
fleece, thicker glass and metal labels.
|| Give the text back with "seedlings" changed to "cuttings" and "slugs" to "snails".
|| Repeat the whole text and put every number in double asterisks.
""")

# A list, then two ways of picking or marking lines.
LINES = [
    (
        """04-11 gate 3 open badge 7719
04-11 gate 1 denied badge 7302
04-12 gate 3 open badge 7740
04-12 gate 2 denied badge 7719
04-13 gate 1 open badge 7302
04-13 gate 3 denied badge 7740
04-14 gate 2 open badge 7719""",
        ['Print only the lines with "denied", unchanged.', 'Copy all lines, but write "entrance" where it says "gate".'],
    ),
    (
        """sku;item;shelf;left
H-204;brass hinge;A3;118
H-209;steel hinge;A3;42
L-017;door latch;B1;9
L-022;gate latch;B1;0
R-301;curtain rail;C7;15
R-305;towel rail;C7;3""",
        ["Return the rows with fewer than 20 left, with the header.", "Repeat the table with commas instead of semicolons."],
    ),
    (
        """- [ ] ring the chimney inspector
- [x] order grout for the pool
- [ ] take the canoe to Milo's shed
- [x] pay for the ferry pass
- [ ] write to the harbour master
- [x] collect the waders""",
        ["Copy the open items only.", "Give me the same list with every item ticked."],
    ),
    (
        """Alto: Rise, silver river, rise again
Bass: Rise, river
Alto: Carry the lantern down the glen
Bass: Carry the lantern
Alto: Sleep, silver river, sleep till then
Bass: Sleep, river""",
        ["Write out only the alto lines.", 'Repeat all lines with "silver" changed to "golden".'],
    ),
    (
        """Q: Is the tower open in winter?
A: Yes, on clear days from eleven to three.
Q: May I bring a pushchair?
A: No, the stairs are too narrow, but you can leave it at the desk.
Q: Is there a toilet?
A: There is one behind the ticket booth.""",
        ["List the questions only, exactly as they are written.", 'Repeat the text with "Question" and "Answer" written out in full.'],
    ),
    (
        """[server]
host = "plover.local"
port = 7011
[cache]
size_mb = 256
evict = "oldest"
[alerts]
to = "ops@plover.local"
quiet_from = "22:30"
""",
        ["Show the file again with port 7044 and size_mb 512.", "Copy the section [alerts] and the section [cache], in this order."],
    ),
]

# Code, then two small changes.
CODE = [
    (
        """class Thermostat:
    def __init__(self, low: float, high: float) -> None:
        self.low = low
        self.high = high
        self.heating = False

    def update(self, reading: float) -> bool:
        if reading < self.low:
            self.heating = True
        elif reading > self.high:
            self.heating = False
        return self.heating""",
        [
            "Rename `reading` to `temperature` and show the whole class.",
            "Add an attribute `switches` that counts the changes of state. Print the complete class.",
        ],
    ),
    (
        """def parse_duration(text: str) -> int:
    units = {"h": 3600, "m": 60, "s": 1}
    seconds = 0
    number = ""
    for ch in text:
        if ch.isdigit():
            number += ch
        elif ch in units and number:
            seconds += int(number) * units[ch]
            number = ""
    return seconds""",
        ['Support days ("d") too. Return the full function.', "Raise a ValueError for an unknown letter; repeat all the code."],
    ),
    (
        """function renderGauge(el, value, max) {
  const share = Math.min(1, value / max);
  const bar = document.createElement("div");
  bar.className = "gauge-bar";
  bar.style.width = `${Math.round(share * 100)}%`;
  el.innerHTML = "";
  el.appendChild(bar);
}""",
        [
            "Give a `color` parameter to the function and set it as the background. Show everything.",
            "Rewrite with `let` instead of `const`, otherwise the same.",
        ],
    ),
    (
        """typedef struct { float x, y, r; } Disc;

int overlap(const Disc *a, const Disc *b) {
    float dx = a->x - b->x;
    float dy = a->y - b->y;
    float reach = a->r + b->r;
    return dx * dx + dy * dy <= reach * reach;
}""",
        ["Change float to double everywhere and print the whole code.", "Add a third coordinate z and show the complete code."],
    ),
    (
        """CREATE TABLE berth (
    id INTEGER PRIMARY KEY,
    pier TEXT NOT NULL,
    length_m REAL NOT NULL,
    has_power BOOLEAN DEFAULT FALSE,
    rented_to TEXT,
    rented_until DATE
);""",
        [
            "Add a column `price_per_night` after `length_m` and print the statement again.",
            "Rename the table to `mooring` and `pier` to `jetty`; repeat the statement.",
        ],
    ),
    (
        """for day in mon tue wed thu fri; do
  src="/srv/plates/$day"
  dst="/mnt/vault/plates/$day"
  mkdir -p "$dst"
  rsync -a --delete "$src/" "$dst/"
  echo "copied $day"
done""",
        ["Include sat and sun and show the script.", "Replace the word plates by prints in all paths; print the script."],
    ),
    (
        """interface Berth { pier: string; metres: number; power: boolean }

export function fitting(all: Berth[], metres: number, power: boolean): Berth[] {
  return all
    .filter((b) => b.metres >= metres)
    .filter((b) => !power || b.power)
    .sort((a, b) => a.metres - b.metres);
}""",
        ["Rename `metres` to `length` everywhere and show the file.", "Sort from long to short instead. Return the whole file."],
    ),
    (
        """fn checksum(rows: &[Vec<u8>]) -> u32 {
    let mut sum: u32 = 7;
    for row in rows {
        for byte in row {
            sum = sum.wrapping_mul(31).wrapping_add(*byte as u32);
        }
    }
    sum
}""",
        ["Use u64 in place of u32 and print the complete function.", "Add a comment above every line and show the function."],
    ),
]


def repetitive_prompts() -> list[tuple[str, str]]:
    """(category, prompt) of all 48: 20 edits of texts, 12 about lists of lines, 16 about code; the wish stands before or after the text."""
    out: list[tuple[str, str]] = []
    for i, entry in enumerate(TEXTS):
        text, first, second = (part.strip() for part in entry.split("||"))
        out.append(("rewriting", f"{first}\n\n{text}"))
        out.append(("rewriting", f"{text}\n\n{second}"))
        if i % 2 == 0:
            word = text.split()[6].strip(".,:")
            out.append(("rewriting", f'Repeat this text and write the word "{word}" in capital letters each time:\n\n{text}'))
    for text, asks in LINES:
        out.append(("extraction", f"{asks[0]}\n\n{text.rstrip()}"))
        out.append(("extraction", f"{text.rstrip()}\n\n{asks[1]}"))
    for code, asks in CODE:
        out.append(("code", f"{asks[0]}\n\n```\n{code}\n```"))
        out.append(("code", f"```\n{code}\n```\n\n{asks[1]}"))
    return out
