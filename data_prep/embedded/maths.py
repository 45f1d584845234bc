"""Maths with generated numbers, and a few questions about the ideas behind them."""

import random
from collections.abc import Callable, Iterator
from fractions import Fraction

from data_prep.embedded.deck import Deck, items
from data_prep.embedded.topics import CITIES, FIRST_NAMES, FOODS

THINGS = items("""
    marbles; stickers; apples; tickets; bricks; postcards; candles; eggs; balloons; bottles; nails; tulips; cookies; pencils; shells;
    tiles; muffins; badges; oranges; socks; chairs; stamps; beads; coins; pears; envelopes
    """)

EQUATION_ASKS = items(
    """
    Solve for {v}: {e} | Find {v} if {e}. | What is {v} in the equation {e}? Show each step. | {e}. {V} = ?
    Solve the equation {e} and check your answer. | Is {v} = {g} a solution of {e}?
    """,
    "|",
)
COMPUTE_ASKS = items(
    """
    What is {e}? | Calculate {e}. | {e} = ? | Work out {e} step by step. | Compute {e} without a calculator and explain how.
    Estimate {e} first, then give the exact value. | how much is {e} | Evaluate the expression {e}. | Is {e} more or less than {g}?
    """,
    "|",
)
SHOW = items(
    """
    Show your work. | Explain each step. | Give only the number. | Think step by step. | Write the equation first. | Check your result.
    Round to two decimals if needed. | Explain it to a beginner.
    """,
    "|",
)

CONCEPT_MATHS = items("""
    Why can't you divide by zero?; What is the sum of the angles in a triangle, and why?; Prove that the sum of two odd numbers is even.;
    Why is the square root of 2 not a fraction? Sketch the proof.; Is 1 a prime number?;
    What is the difference between a number and a digit?; Explain how to add two fractions with different denominators.;
    Why does a minus times a minus give a plus?; Give an example of a function that is not linear.;
    How many diagonals does a hexagon have?; What does it mean that two events are independent?; List the first ten square numbers.;
    Name the regular solids.; Give me a trick for multiplying by 11.;
    What is the formula for the area of a circle, and where does it come from?; Write the number 2024 in Roman numerals.;
    How do I find out whether a number is divisible by 3?; What is the median good for?; Explain the distributive law with rectangles.;
    What is a logarithm in one sentence?; Write a word problem whose answer is 17.;
    Make up three exercises about percentages for a 12-year-old, with solutions.; What are parallel lines?; Is zero even or odd?;
    Write down a system of two equations that has no solution.; What is the derivative of sin(x)?;
    Show that the sum of the first n odd numbers is n squared.; How many ways are there to arrange the letters of the word LEVEL?;
    What is the greatest common divisor good for?; Explain why 0.999... equals 1.
    """)


class Maths:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.names, self.things, self.cities = Deck(rng, FIRST_NAMES), Deck(rng, THINGS), Deck(rng, CITIES)
        self.foods, self.show = Deck(rng, FOODS), Deck(rng, SHOW)
        self.compute_asks, self.equation_asks = Deck(rng, COMPUTE_ASKS), Deck(rng, EQUATION_ASKS)
        self.kinds: Deck[Callable[[], str]] = Deck(
            rng,
            [
                self.arithmetic,
                self.arithmetic,
                self.arithmetic,
                self.fractions,
                self.percent,
                self.discount,
                self.equation,
                self.equation,
                self.quadratic,
                self.system,
                self.shopping,
                self.sharing,
                self.speed,
                self.meeting,
                self.ages,
                self.geometry,
                self.geometry,
                self.sequence,
                self.average,
                self.probability,
                self.units,
                self.interest,
                self.work_rate,
                self.ratio,
                self.primes,
                self.combinatorics,
                self.derivative,
                self.time_math,
                self.recipe,
                self.remainder,
                self.bases,
                self.story,
                self.story,
                self.tank,
                self.compare,
                self.table,
                self.inequality,
                self.powers,
            ],
        )

    def n(self, low: int, high: int) -> int:
        return self.rng.randint(low, high)

    def pick(self, *options: str) -> str:
        return self.rng.choice(options)

    def arithmetic(self) -> str:
        a, b, c = self.n(11, 999), self.n(3, 99), self.n(2, 60)
        e = self.pick(
            f"{a} + {b} * {c}",
            f"{a} - {b}",
            f"{a} * {b}",
            f"({a} + {b}) * {c}",
            f"{a * b} / {b}",
            f"{a / 10} + {b / 100}",
            f"{a} + {b} + {c} + {self.n(5, 500)}",
            f"{a / 10} * {c}",
            f"{b}^2 - {c}",
            f"-{a} + {b} * 2",
            f"{a * c} ÷ {c} - {b}",
        )
        return self.compute_asks.deal().format(e=e, g=self.n(100, 20000))

    def fractions(self) -> str:
        a, b = Fraction(self.n(1, 9), self.n(2, 12)), Fraction(self.n(1, 9), self.n(2, 12))
        return self.pick(
            f"What is {a} + {b} as a fraction in lowest terms?",
            f"Subtract {b} from {a}.",
            f"Multiply {a} by {b} and simplify.",
            f"Which is larger, {a} or {b}? Explain.",
            f"Divide {a} by {b}.",
            f"Write {a} as a decimal number.",
            f"Order these from small to large: {a}, {b}, {Fraction(self.n(1, 7), self.n(3, 9))}, 0.{self.n(1, 9)}.",
            f"{self.names.deal()} eats {a.numerator} of {a.denominator + a.numerator} slices of a pizza. What fraction is left?",
        )

    def percent(self) -> str:
        p, x = self.n(2, 95), self.n(20, 900)
        return self.pick(
            f"What is {p}% of {x}?",
            f"{p} is what percent of {x}?",
            f"A town of {x * 100} people grows by {p}% in ten years. How many people live there then?",
            f"After a raise of {p}% the wage is {x * 10}. What was it before?",
            f"{x} pupils were asked, {p}% of them walk to school. How many is that?",
            f"A phone battery falls from {p + 5}% to {max(1, p // 2)}% in {self.n(2, 9)} hours. How much is that per hour?",
        )

    def discount(self) -> str:
        price, p, q = self.n(15, 480), self.rng.choice([5, 10, 15, 20, 25, 30, 40]), self.rng.choice([5, 10, 20])
        return self.pick(
            f"A jacket costs {price} and is reduced by {p}%. What is the new price?",
            f"Shop A takes {p}% off {price}, shop B takes off {q} and then {q}% more. Which one is cheaper?",
            f"I paid {price} after a discount of {p}%. What was the original price?",
            f"A price of {price} first rises by {p}% and then falls by {p}%. Is it the same as before? {self.show.deal()}",
            f"A bill is {price}.{self.n(10, 99)} and I want to tip {p}%. How much do I pay in total?",
        )

    def equation(self) -> str:
        v, a, x, b = self.rng.choice("xyznkt"), self.n(2, 14), self.n(-9, 25), self.n(1, 60)
        e = self.pick(
            f"{a}{v} + {b} = {a * x + b}",
            f"{a}({v} - {b}) = {a * (x - b)}",
            f"{v}/{a} + {b} = {x + b}",
            f"{a + 2}{v} - {b} = 2{v} + {a * x - b}",
            f"{b} - {a}{v} = {b - a * x}",
        )
        return self.equation_asks.deal().format(v=v, V=v, e=e, g=x + self.n(-1, 1))

    def quadratic(self) -> str:
        p, q = self.n(-9, 9), self.n(-9, 9)
        if p == -q:
            p += 1
        b, c = -(p + q), p * q
        poly = f"x^2 {'+' if b >= 0 else '-'} {abs(b)}x {'+' if c >= 0 else '-'} {abs(c)}"
        return self.pick(
            f"Solve {poly} = 0.",
            f"Factor {poly}.",
            f"Where does the graph of y = {poly} cross the x-axis?",
            f"Find the vertex of y = {poly}.",
            f"Expand (x - {abs(p) + 1})(x + {abs(q) + 2}).",
            f"What is the value of {poly} at x = {self.n(-4, 8)}?",
        )

    def system(self) -> str:
        x, y, a, b = self.n(-5, 12), self.n(-5, 12), self.n(2, 6), self.n(2, 6)
        return self.pick(
            f"Solve the system: x + y = {x + y}, {a}x - {b}y = {a * x - b * y}.",
            f"Two numbers add up to {abs(x) + abs(y) + 20} and differ by {abs(x - y) + 2}. Which numbers are they?",
            f"{a} {self.things.deal()} and {b} {self.things.deal()} cost {a * 3 + b * 5}; one of each costs 8. Find both prices. "
            f"{self.show.deal()}",
        )

    def shopping(self) -> str:
        f, g = self.foods.hand(2)
        k, m, p, q = self.n(2, 9), self.n(2, 9), self.n(50, 700) / 100, self.n(50, 400) / 100
        return self.pick(
            f"{self.names.deal()} buys {k} kg of {f} at {p:.2f} a kilo and {m} packs of {g} at {q:.2f} each. How much is it in total?",
            f"{k} packs of {f} cost {k * p:.2f}. What do {m + k} packs cost?",
            f"With {self.n(20, 60)} euros, how many packs of {f} at {p:.2f} can {self.names.deal()} buy, and how much is left?",
            f"Which is the better buy: {k}00 g of {g} for {p:.2f} or {m}50 g for {q:.2f}?",
        )

    def sharing(self) -> str:
        a, b = self.names.hand(2)
        t, k, m = self.things.deal(), self.n(20, 180), self.n(3, 12)
        return self.pick(
            f"{a} has {k} {t} and gives {m} of them to {b}, who then has twice as many as before. How many did {b} have?",
            f"{m} children share {k} {t} fairly. How many does each get, and how many are left over?",
            f"{a} and {b} have {k} {t} together. {a} has {m} more than {b}. How many does each have?",
            f"{a} packs {k} {t} into boxes of {m}. How many boxes are needed?",
            f"{a} had {k} {t}, lost {m}, then won {self.n(4, 30)} and gave half of the rest to {b}. How many are left? {self.show.deal()}",
        )

    def speed(self) -> str:
        v, h, c = self.n(4, 130), self.n(2, 9), self.cities.deal()
        return self.pick(
            f"A train travels at {v} km/h for {h} and a half hours. How far does it get?",
            f"It is {v * h} km to {c}. How long does it take at {v} km/h?",
            f"{self.names.deal()} walks {h} km in {self.n(25, 110)} minutes. What is the average speed in km/h?",
            f"A cyclist rides {v // 4 + 8} km/h uphill and {v // 2 + 20} km/h on the way back over the same {h * 3} km. What is the "
            "average speed?",
            f"How many metres per second are {v} km/h?",
        )

    def meeting(self) -> str:
        a, b = self.cities.hand(2)
        v, w = self.n(50, 110), self.n(50, 110)
        return (
            f"{a} and {b} are {(v + w) * self.n(2, 6)} km apart in this puzzle. "
            f"{self.pick('Two trains', 'Two cars', 'Two buses')} "
            f"start at the same time, one at {v} km/h, the other at {w} km/h, towards each other. When do they meet? {self.show.deal()}"
        )

    def ages(self) -> str:
        a, b = self.names.hand(2)
        k, m = self.n(2, 5), self.n(3, 20)
        return self.pick(
            f"{a} is {k} times as old as {b}. In {m} years {a} will be twice as old as {b}. How old are they now?",
            f"{a} is {m} years older than {b}. Together they are {2 * self.n(9, 40) + m}. How old is {b}?",
            f"{k + 2} years ago {a} was {m}. How old will {a} be in {m + 1} years?",
            f"The ages of {a}, {b} and their mother add up to {self.n(60, 99)}. The mother is {self.n(30, 45)}, and {a} is {k} "
            f"years older than {b}. Find all ages.",
        )

    def geometry(self) -> str:
        a, b, c = self.n(2, 40), self.n(2, 40), self.n(2, 15)
        return self.pick(
            f"What is the area of a rectangle of {a} cm by {b} cm?",
            f"A circle has a radius of {c} cm. What are its area and its circumference?",
            f"Find the hypotenuse of a right triangle with legs {a} and {b}.",
            f"A box is {a} cm long, {b} cm wide and {c} cm high. What is its volume, and what is its surface?",
            f"Two angles of a triangle are {a + 20} and {b + 25} degrees. How large is the third?",
            f"A square has the area {a * a}. How long is its diagonal?",
            f"A garden of {a} m by {b} m gets a path of {c / 10} m width all around it. What is the area of the path?",
            f"The perimeter of a rectangle is {2 * (a + b)} and one side is {a}. What is the other side?",
            f"How many tiles of {c * 5} cm by {c * 5} cm cover a floor of {a} m by {b} m?",
            f"A ladder of {c + 3} m leans against a wall, its foot {c / 4:.1f} m away. How high does it reach?",
            f"A cylinder is {a} cm high and {c} cm wide. How many litres does it hold?",
            f"Find the distance between the points ({a}, {b}) and ({c}, {-b}).",
            f"Find the slope of the line through ({c}, {a}) and ({c + 4}, {b}).",
        )

    def sequence(self) -> str:
        s, d, r = self.n(-9, 30), self.n(2, 13), self.n(2, 4)
        seq = self.rng.choice(
            [
                [s + d * i for i in range(5)],
                [(abs(s) + 1) * r**i for i in range(5)],
                [i * i + d for i in range(1, 6)],
                [s, s + d, s + 3 * d, s + 6 * d, s + 10 * d],
                [s * 2, s * 2 - d, s * 2, s * 2 - d - 1, s * 2],
            ]
        )
        return self.pick(
            "What comes next: {q}, ?",
            "Continue the sequence {q} by three numbers and state the rule.",
            "Find the rule: {q}, ...",
            "What is the 20th term of {q}, ...?",
            "Which number does not belong: {q}, " + str(self.n(100, 400)) + "?",
        ).format(q=", ".join(map(str, seq)))

    def average(self) -> str:
        xs = ", ".join(str(self.n(2, 99)) for _ in range(self.n(4, 7)))
        return self.pick(
            f"Find the mean and the median of {xs}.",
            f"The marks of a class are {xs}. What is the average, and which mark would {self.names.deal()} need to raise it by one?",
            f"What is the range of {xs}?",
            f"Sort {xs} and name the middle value.",
            f"Compute the standard deviation of {xs}. {self.show.deal()}",
        )

    def probability(self) -> str:
        r, b, k = self.n(2, 12), self.n(2, 12), self.n(5, 11)
        return self.pick(
            f"A bag holds {r} red and {b} blue balls. What is the probability to draw a red one? And two red ones in a row without "
            "putting back?",
            f"Two dice are thrown. How likely is a sum of {k}?",
            f"A coin is thrown {k - 2} times. What is the chance of at least one head?",
            f"In a class of {r + b + 10}, {r + 3} play football and {b} play music, {min(r, b) - 1} do both. How many do neither?",
            f"What is the probability that a card from a deck of 52 is a heart or a {self.pick('king', 'seven', 'queen', 'two')}?",
            f"It rains on one day in {r + 1}, independently. How likely are {self.n(2, 5)} dry days in a row?",
            f"A test finds {80 + r}% of faults and gives a false alarm in {b}% of good parts. One part in {k * 10} is faulty. How "
            "likely is a fault if the test says so?",
        )

    def units(self) -> str:
        x = self.n(2, 950)
        return self.pick(
            f"Convert {x} minutes to hours and minutes.",
            f"How many litres are {x * 100} millilitres?",
            f"Convert {x / 10} miles to kilometres.",
            f"What is {x % 60 - 15} degrees Celsius in Fahrenheit?",
            f"Convert {x} inches to centimetres.",
            f"How many seconds are in {x % 40 + 2} days?",
            f"Express {x} g in kilograms.",
            f"How many square metres are {x * 10} square centimetres?",
            f"A recipe needs {x % 5 + 2} cups of flour. About how many grams is that?",
            f"Convert {x * 1000} bytes to kilobytes and to megabytes.",
            f"How many weeks and days are {x} days?",
        )

    def interest(self) -> str:
        p, r, y = self.n(2, 90) * 100, self.n(10, 75) / 10, self.n(2, 12)
        return self.pick(
            f"{p} euros are saved at {r}% a year for {y} years. What is the sum with compound interest?",
            f"What is the simple interest on {p} at {r}% after {y} years?",
            f"How long does it take for money to double at {r}%?",
            f"A loan of {p} at {r}% is paid back in {y} equal yearly parts. Roughly how much is each?",
            f"{self.names.deal()} saves {p // 20} a month. How much is that after {y} years without interest, and why is it more "
            f"with {r}%?",
        )

    def work_rate(self) -> str:
        a, b = self.names.hand(2)
        k, m = self.n(2, 9), self.n(3, 12)
        return self.pick(
            f"{a} paints a fence in {k} hours, {b} in {m} hours. How long do they need together?",
            f"{k} machines make {k * m} parts in {k} hours. How many parts do {m} machines make in {m} hours?",
            f"One tap fills a bath in {m} minutes, another in {m + k} minutes. How long do both take?",
            f"{k + 2} workers need {m} days. How many days do {k} workers need for the same job?",
        )

    def ratio(self) -> str:
        a, b, t = self.n(2, 9), self.n(2, 9), self.n(3, 40)
        return self.pick(
            f"Divide {(a + b) * t} in the ratio {a}:{b}.",
            f"Paint is mixed from blue and white in the ratio {a}:{b}. How much white goes with {t * a} ml of blue?",
            f"On a map of scale 1:{t}000, two villages are {a}.{b} cm apart. What is the real distance?",
            f"Simplify the ratio {a * t}:{b * t}.",
            f"A photo of {a * 3} by {b * 3} cm is enlarged to a width of {a * t} cm. How high does it become?",
        )

    def primes(self) -> str:
        a, b = self.n(12, 400), self.n(12, 400)
        return self.pick(
            f"Find the prime factors of {a * 2}.",
            f"Is {a * 2 + 1} a prime number? Explain how you know.",
            f"What is the greatest common divisor of {a} and {b}?",
            f"Find the least common multiple of {a % 30 + 2} and {b % 30 + 3}.",
            f"List all divisors of {a}.",
            f"Which primes lie between {a} and {a + 30}?",
            f"Is {a * b} divisible by {b % 9 + 2}?",
        )

    def combinatorics(self) -> str:
        a, b = self.n(4, 12), self.n(2, 4)
        return self.pick(
            f"In how many ways can {a} people stand in a row?",
            f"How many teams of {b} can be chosen from {a} people?",
            f"A menu has {b} starters, {a} main dishes and {b + 1} desserts. How many different meals are there?",
            f"How many {b}-digit codes can be made from {a} different symbols if none may repeat?",
            f"{a} people shake hands with each other once. How many handshakes are there?",
            f"How many numbers from 1 to {a * 25} contain the digit {b}?",
        )

    def derivative(self) -> str:
        a, b, c = self.n(2, 9), self.n(2, 6), self.n(1, 20)
        return self.pick(
            f"Find the derivative of f(x) = {a}x^{b} - {c}x.",
            f"Integrate {a}x^{b} + {c} dx.",
            f"What is the limit of ({a}x + {c})/(x + {b}) as x grows without bound?",
            f"At which x does f(x) = x^2 - {2 * a}x + {c} have its minimum?",
            f"Find the tangent to y = x^{b} at x = {a % 4 + 1}.",
            f"Differentiate {a} sin({b}x) + {c}.",
        )

    def time_math(self) -> str:
        h, m, d = self.n(6, 21), self.n(1, 59), self.n(35, 400)
        return self.pick(
            f"A film starts at {h}:{m:02d} and lasts {d % 130 + 60} minutes. When does it end?",
            f"What time is it {d} minutes after {h}:{m:02d}?",
            f"Today is {self.pick('Monday', 'Thursday', 'Sunday')}. What day of the week is it in {d} days?",
            f"A shift goes from {h - 5}:{m:02d} to {h + 1}:10 with a break of {m % 40 + 5} minutes. How long is the working time?",
            f"By how many degrees does the minute hand move in {m} minutes?",
            f"The clock loses {m % 9 + 1} minutes a day. After how many days is it an hour slow?",
        )

    def recipe(self) -> str:
        f, k, m = self.foods.deal(), self.n(2, 6), self.n(7, 16)
        return (
            f"A recipe for {k} people needs {self.n(8, 60) * 10} g of {f} and {self.n(1, 5)} spoons of oil. "
            f"How much is needed for {m} people? {self.show.deal()}"
        )

    def remainder(self) -> str:
        a, b = self.n(50, 5000), self.n(3, 19)
        return self.pick(
            f"What is the remainder when {a} is divided by {b}?",
            f"{a} mod {b} = ?",
            f"Find the smallest number above {a} that is divisible by {b}.",
            f"Divide {a} by {b} with long division.",
            f"What is the last digit of {b}^{a % 12 + 3}?",
        )

    def bases(self) -> str:
        a = self.n(9, 500)
        return self.pick(
            f"Write {a} in binary.",
            f"What is the binary number {a:b} in decimal?",
            f"Convert the hexadecimal number {a:X} to decimal.",
            f"Add the binary numbers {a:b} and {self.n(3, 60):b}.",
            f"Round {a}.{self.n(11, 99)}{self.n(1, 9)} to one decimal.",
            f"Write {a * 1000} in scientific notation.",
        )

    def story(self) -> str:
        a, b = self.names.hand(2)
        k, m, p = self.n(3, 30), self.n(4, 25), self.n(2, 12)
        return self.pick(
            f"A bus starts with {k + 10} people. At the first stop {m} get on and {p} get off, at the second stop half of them "
            "leave. How many are on the bus now?",
            f"{a} reads {k} pages on weekdays and twice as many on each day of the weekend. How many weeks does a book of {k * 45} "
            "pages take?",
            f"A snail climbs {p + 3} cm by day and slides back {p} cm by night. When does it reach the top of a wall of {k * 3 + p} cm?",
            f"In a yard there are hens and rabbits, {k + m} heads and {2 * k + 4 * m} legs. How many rabbits are there?",
            f"{a} earns {p + 9} an hour and works {m + 10} hours a week; {b} earns {p + 12} but works {m + 6} hours. Who earns "
            "more, and by how much?",
            f"A baker makes {k * 12} rolls. {p * 5}% are burnt and the rest is sold in bags of {p}. How many full bags are there?",
            f"{a} runs {k} laps of {m * 20} m, {b} runs {k + 2} laps of {m * 18} m. Who runs further?",
            f"A theatre has {k} rows of {m} seats. {k * m - p * 3} seats are taken. How many are free, and what share is that?",
            f"A phone plan costs {p + 5} a month plus {p} cents a minute; another costs {p + 14} with everything included. From how "
            "many minutes on is the second one cheaper?",
            f"{a} plants a tree every {p} metres along a path of {p * m} m, at both ends too. How many trees are needed?",
            f"There are {k} stairs between two floors. {a} lives on floor {p} and goes up and down twice a day. How many stairs is "
            "that in a week?",
            f"A rope of {k * m} cm is cut so that one part is {p} times as long as the other. How long are the parts?",
        ) + self.rng.choice(["", "", " " + self.show.deal()])

    def tank(self) -> str:
        v, f, d = self.n(4, 90) * 10, self.n(6, 30), self.n(1, 5)
        return self.pick(
            f"A tank of {v} litres is filled at {f} litres a minute while {d} litres a minute run out. When is it full?",
            f"A car needs {d + 4}.{d} litres per 100 km. How far does it get with {v // 10} litres?",
            f"An aquarium measures {f * 4} by {f * 2} by {f * 2} cm. How many litres does it hold if it is filled to {50 + d * 8}%?",
        )

    def compare(self) -> str:
        a, b, c = self.n(2, 9), self.n(2, 9), self.n(2, 9)
        return self.pick(
            f"Which is larger: {a}^{b} or {b}^{a}?",
            f"Put in order: {a}/{b + c}, {c / 10}, {a * 7}%.",
            f"Which is more: {a}0% of {b}0 or {b}5% of {a}0?",
            f"True or false: ({a} + {b})^2 = {a}^2 + {b}^2. Explain.",
            f"Is the square root of {a * b * c * 3} closer to {a + b} or to {a * 3}?",
        )

    def table(self) -> str:
        a, b = self.names.hand(2)
        t, xs = self.things.deal(), [self.n(4, 60) for _ in range(4)]
        rows = f"{t} sold\nMonday: {xs[0]}\nTuesday: {xs[1]}\nWednesday: {xs[2]}\nThursday: {xs[3]}"
        return f"{rows}\n\n" + self.pick(
            "On which day were most sold, and how many in all?",
            f"{a} sold the first two days, {b} the others. Who sold more?",
            "By how many percent did sales change from Monday to Thursday?",
            "What is the average per day?",
            "Describe the trend in one sentence and predict Friday.",
        )

    def inequality(self) -> str:
        a, b, c = self.n(2, 9), self.n(1, 30), self.n(31, 90)
        return self.pick(
            f"Solve {a}x + {b} < {c}.",
            f"For which x is {c} - {a}x at least {b}?",
            f"Solve |x - {b}| = {a}.",
            f"Which whole numbers satisfy {b} < {a}x < {c}?",
            f"Simplify {a}x + {b} - {a - 1}x + {c}.",
            f"Solve for r: {c} = {a}r / {b}.",
            f"Solve v = u + at for t, then put in v = {c}, u = {b}, a = {a}.",
        )

    def powers(self) -> str:
        a, b, c = self.n(2, 12), self.n(2, 5), self.n(2, 5)
        return self.pick(
            f"Simplify {a}^{b} * {a}^{c}.",
            f"What is the square root of {a * a * c * c}?",
            f"Evaluate log base {a} of {a**b}.",
            f"What is {a}^-{b} as a fraction?",
            f"Simplify the square root of {a * a * c}.",
            f"Bacteria double every {a + 10} minutes. How many are there after {b} hours if we start with {c}?",
            f"Compute {a}! / {a - 2}!.",
        )


def maths_prompts(rng: random.Random) -> Iterator[str]:
    maths = Maths(rng)
    yield from CONCEPT_MATHS
    while True:
        yield maths.kinds.deal()()
