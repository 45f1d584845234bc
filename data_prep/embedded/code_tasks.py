"""Code: small functions to write in several languages, snippets to explain, mend, test and translate, SQL, shell, concepts."""

import random
from collections.abc import Iterator

from data_prep.embedded.deck import Deck, items
from data_prep.embedded.topics import ALL_TOPICS

# Each fits after "a function that".
FUNCTIONS = items("""
    reverses a string; checks whether a word is a palindrome; counts the vowels in a text; returns the n-th Fibonacci number;
    computes the factorial of a number; finds the largest number in a list; removes duplicates from a list but keeps the order;
    sorts a list of words by length; merges two sorted lists; checks whether a number is prime; returns all primes below n;
    sums the digits of an integer; converts Celsius to Fahrenheit; converts a Roman numeral to an integer; converts an integer to binary;
    finds the second largest element; rotates a list by k places; flattens a nested list; counts how often each word occurs;
    finds the most common letter; checks whether two words are anagrams; capitalises each word; replaces spaces by hyphens;
    removes all punctuation; splits a text into sentences; validates an email address in a simple way; generates a random password;
    shuffles a deck of cards; simulates rolling two dice; computes the average of a list; computes the median;
    computes the greatest common divisor; solves a quadratic equation; checks whether a year is a leap year;
    returns the number of days between two dates; formats seconds as hh:mm:ss; reads a file and counts its lines;
    writes a list of names to a file; parses a CSV line; groups records by a key; finds the longest common prefix of a list of strings;
    finds the intersection of two lists; checks whether brackets are balanced; implements a stack with push and pop; implements a queue;
    performs a binary search; performs bubble sort; performs quicksort; implements insertion sort; traverses a binary tree in order;
    computes the depth of a tree; reverses a linked list; detects a cycle in a linked list; transposes a matrix; multiplies two matrices;
    rotates a square matrix by 90 degrees; prints a multiplication table; prints a triangle of stars; plays FizzBuzz;
    encodes a text with a Caesar cipher; run-length encodes a string; computes the Hamming distance;
    computes the edit distance of two words; finds all permutations of a list; finds all subsets of a set; returns the power set's size;
    checks whether a list is sorted; moves all zeros to the end of a list; finds the missing number from 1 to n;
    finds two numbers that add up to a target; splits a list into chunks of size n; zips two lists into a dictionary; inverts a dictionary;
    merges two dictionaries and adds the values; counts words longer than five letters; truncates a text and adds dots;
    pads a number with zeros; compares two version numbers; parses a query string; builds a URL from parts; retries a request three times;
    measures how long another function takes; caches the results of another function; logs every call; limits a value to a range;
    rounds to the nearest five; computes the distance between two points; checks whether a point lies in a rectangle;
    computes the area of a polygon; counts the islands in a grid; finds the shortest way through a maze;
    lists all files with a given ending; deletes empty lines from a text; finds duplicate files; backs up a folder; converts JSON to CSV;
    draws a random item with given weights; turns snake_case into camelCase; checks whether a sudoku row is valid;
    decides who won a game of tic-tac-toe; deals five cards to each player; computes a shopping total with tax; applies a discount code;
    converts currencies with a given rate; makes an acronym from a phrase; counts down to zero and prints a message
    """)

LANGUAGES = items("""
    Python; Python; Python; JavaScript; JavaScript; TypeScript; C; C; C++; Java; Go; Rust; Bash; Ruby; PHP; Kotlin; Swift; Haskell; R
    """)
WRITE_FORMS = items(
    """
    Write a function in {l} that {f}. | Write a {l} function that {f}. Include a docstring or comment and one example call.
    In {l}, how would I write a function that {f}? | {l}: a function that {f}. Code only, no explanation.
    Implement a function that {f} in {l}. Handle empty input.
    Please write a short {l} program with a function that {f}, and explain each line.
    I'm learning {l}. Show me a simple function that {f}.
    Write a recursive function in {l} that {f}, or explain why recursion is a bad idea here.
    Give me two ways in {l} to write a function that {f}, and compare them. | write {l} code: function that {f}
    Write a function that {f}. Use {l}, no libraries. | Write unit tests for a {l} function that {f}.
    Explain in plain words, then in {l} code, how to write a function that {f}.
    What is the time complexity of a function that {f}? Show the code in {l}.
    Write pseudocode for a function that {f}. Then translate it to {l}.
    Write a {l} one-liner, if possible, that does the same as a function that {f}. | Name five edge cases to test for a function that {f}.
    Design the signature and the documentation of a {l} function that {f}. No body yet.
    Write a {l} function that {f}, with type annotations where the language allows it.
    My homework: a function that {f} in {l}. Don't give me the solution, only hints.
    """,
    "|",
)

TABLES = items("""
    customers(id, name, city, joined); orders(id, customer_id, total, day); books(id, title, author_id, year, price);
    employees(id, name, salary, dept_id, boss_id); students(id, name, birth_year, class); flights(no, origin, target, departs, seats);
    songs(id, title, artist, seconds, plays); rooms(id, building, capacity, has_screen); recipes(id, name, minutes, vegan);
    visits(patient_id, doctor_id, day, fee); players(id, name, team, goals); products(id, name, stock, price, category);
    loans(book_id, member_id, taken, returned); sensors(id, place, celsius, read_at)
    """)
SQL_TASKS = items("""
    returns the five rows with the highest value in a numeric column of your choice; counts the rows per group;
    finds rows that occur twice; adds a new row and then changes it; deletes the rows older than one year; shows the average per month;
    finds all rows without a value in the last column; lists everything in alphabetical order, ten per page; computes a running total;
    creates the table with sensible types and a primary key; adds an index and says when it helps;
    joins it with a second table that you define; finds the rows above the average; ranks the rows within each group;
    turns the result into a view
    """)
SQL_FORMS = items(
    """
    Table: {t}. Write an SQL query that {q}. | Given the table {t}, write SQL that {q}. Explain it briefly.
    SQL help: I have {t} and need a statement that {q}. | Write a PostgreSQL statement that {q}. The table is {t}.
    For {t}, write a query that {q}, then describe what the output looks like.
    """,
    "|",
)

SHELL = items("""
    find all files larger than 100 MB; count the lines of all .py files in a folder; rename all .jpeg files to .jpg;
    show the ten largest folders; search for a word in all text files; kill a process by its name; unpack a tar.gz archive;
    copy a folder to another machine; watch a log file as it grows; replace a word in many files; list the open ports;
    show free disk space; run a script every night at two; sort a file and remove duplicate lines; print the third column of a CSV file;
    make a script executable; compare two folders; download a file and check its checksum; set an environment variable;
    find out which program uses a port; undo the last git commit but keep the changes; create and switch to a new git branch;
    show who changed a line in git; squash three git commits; delete a remote git branch; stash changes and get them back;
    see the history of one file; create a virtual environment for Python; install packages from a requirements file;
    see which shell I am using; loop over all files in a folder; measure how long a command takes
    """)
SHELL_FORMS = items(
    """
    How do I {s} on the command line? | Linux command to {s}? | Give me a shell command to {s} and explain its options. | bash: {s}
    Write a small Bash script to {s}. Add comments. | I want to {s}. Which command do I need, and what should I be careful about?
    """,
    "|",
)

# (language, code): small pieces written for this file. Some are right, some have a fault.
SNIPPETS = [
    (lang.strip(), code.strip("\n"))
    for lang, code in (
        block.split("\n", 1)
        for block in """
Python
def total(prices):
    sum = 0
    for p in prices:
        sum =+ p
    return sum
===
Python
def first_word(text):
    return text.split(" ")[1]
===
Python
def add_item(item, basket=[]):
    basket.append(item)
    return basket
===
Python
squares = {n: n * n for n in range(10) if n % 2}
print(max(squares.values()))
===
Python
def is_even(n):
    if n % 2 == 1:
        return True
    return False
===
Python
while True:
    age = input("Age? ")
    if age > 0:
        break
===
Python
def countdown(n):
    if n == 0:
        return
    print(n)
    countdown(n - 1)
    print(n)
===
Python
names = ["Mia", "Tom", "Eva"]
for i in range(len(names) + 1):
    print(names[i])
===
Python
from collections import Counter
def top(text, k=3):
    return [w for w, _ in Counter(text.lower().split()).most_common(k)]
===
Python
class Account:
    def __init__(self, owner, balance):
        self.owner = owner
    def pay(self, amount):
        self.balance -= amount
===
Python
with open("data.txt") as f:
    lines = [line.strip() for line in f if line.strip()]
print(len(lines))
===
Python
def safe_div(a, b):
    try:
        return a / b
    except:
        pass
===
Python
matrix = [[0] * 3] * 3
matrix[0][0] = 1
print(matrix)
===
Python
def primes(n):
    return [p for p in range(2, n) if all(p % d for d in range(2, p))]
===
JavaScript
const nums = [10, 9, 1, 100];
nums.sort();
console.log(nums);
===
JavaScript
for (var i = 0; i < 3; i++) {
  setTimeout(() => console.log(i), 100);
}
===
JavaScript
function isEmpty(value) {
  return value == false;
}
===
JavaScript
const unique = (xs) => [...new Set(xs)];
console.log(unique([3, 3, 1, 2, 1]));
===
JavaScript
async function load(url) {
  const data = fetch(url).json();
  return data.items;
}
===
JavaScript
const total = cart
  .filter((x) => x.inStock)
  .map((x) => x.price * x.count)
  .reduce((a, b) => a + b, 0);
===
JavaScript
document.getElementById("save").onclick = function () {
  this.disabled = true;
  setTimeout(() => { this.disabled = false; }, 2000);
};
===
C
int sum(int *a, int n) {
    int s;
    for (int i = 0; i <= n; i++) s += a[i];
    return s;
}
===
C
char *greet(void) {
    char buf[16] = "hello";
    return buf;
}
===
C
void swap(int *a, int *b) {
    int t = *a;
    *a = *b;
    *b = t;
}
===
C
int length(const char *s) {
    int n = 0;
    while (*s++) n++;
    return n;
}
===
C
int *make(int n) {
    int *p = malloc(n);
    for (int i = 0; i < n; i++) p[i] = i;
    return p;
}
===
SQL
SELECT name, COUNT(*) FROM orders WHERE COUNT(*) > 3 GROUP BY name;
===
SQL
SELECT c.name, o.total
FROM customers c LEFT JOIN orders o ON o.customer_id = c.id
WHERE o.id IS NULL;
===
SQL
UPDATE products SET price = price * 1.1;
===
SQL
SELECT dept, AVG(salary) AS pay FROM staff GROUP BY dept HAVING AVG(salary) > 3000 ORDER BY pay DESC;
===
Bash
for f in *.txt; do
  mv $f ${f%.txt}.md
done
===
Bash
#!/bin/bash
if [ $1 = "yes" ] then
  echo "ok"
fi
===
Bash
grep -rn "TODO" src | cut -d: -f1 | sort | uniq -c | sort -rn | head -5
===
Java
public static boolean same(String a, String b) {
    return a == b;
}
===
Java
List<Integer> xs = new ArrayList<>(List.of(1, 2, 3, 4));
for (Integer x : xs) {
    if (x % 2 == 0) xs.remove(x);
}
===
Go
func divide(a, b int) int {
    return a / b
}
===
Rust
fn main() {
    let s = String::from("tea");
    let t = s;
    println!("{} {}", s, t);
}
===
HTML
<form>
  <label>Name</label> <input id="name">
  <button onclick="send()">Send</button>
</form>
===
CSS
.card { display: flex; gap: 8px; }
.card img { width: 100px; border-radius: 50%; }
===
TypeScript
interface Pet { name: string; age?: number }
function label(p: Pet): string {
  return p.name + " (" + p.age.toFixed(0) + ")";
}
""".strip().split("\n===\n")
    )
]

SNIPPET_FORMS = items(
    """
    What does this {l} code do?[][]{c} | Explain this code line by line:[][]{c} | Is there a bug in this {l} code? If so, fix it.[][]{c}
    Review this code and suggest improvements:[][]{c} | Rewrite this code so that it is easier to read:[][]{c}
    Add comments to this {l} snippet:[][]{c} | {c}[][]What would a test for this look like? | Translate this from {l} to {m}:[][]{c}
    What happens with unusual input here?[][]{c} | My teacher says this could be shorter. Can it?[][]{c}
    {c}[][]Give me a one-sentence summary. | Write a docstring or header comment for this:[][]{c}
    What should I rename in this code?[][]{c} | Would this code still work with a million entries? Explain.[][]{c}
    I found this in an old project. Is it safe to use?[][]{c} | Explain to a beginner:[][]{c}
    Predict the output, or say why there is none:[][]{c}
    """,
    "|",
)

CONCEPTS = items("""
    list comprehensions in Python; decorators; closures; async and await; promises; classes and objects; interfaces; generics; exceptions;
    logging levels; regular expressions; environment variables; REST APIs; JSON; YAML files; SQL injection; primary and foreign keys;
    transactions; indexes; normalisation of tables; unit and integration tests; mocking; continuous integration; code reviews;
    semantic versioning; Docker images; makefiles; header files in C; pointers in C; memory leaks; stack and heap; threads; mutexes;
    event loops; state in a web page; CSS grid; the DOM; cookies; hashing of passwords; rate limits; pagination; lazy loading;
    lambda functions; generators; type hints; enums; linters; pair programming; technical debt; design patterns; the observer pattern;
    dependency injection; feature flags
    """)
CONCEPT_FORMS = items(
    """
    Explain {k} with a small code example. | When should I use {k}, and when not? | What are common mistakes with {k}?
    I keep hearing about {k}. What is it? | Give me three interview questions about {k} with short answers.
    Show a good and a bad example of {k}.
    """,
    "|",
)
PROJECTS = items("""
    a to-do list; a quiz; a unit converter; a guestbook; a countdown timer; a tip calculator; a text adventure; a hangman game;
    a vocabulary trainer; a budget planner; a weather widget; an address book; a photo gallery; a voting page; a recipe search;
    a habit tracker; a stopwatch; a rock-paper-scissors game; a dice roller; a reading list
    """)
PROJECT_FORMS = items(
    """
    Write a minimal HTML page with JavaScript for {p} about {t}. | Plan the data model for {p}. Which tables or classes are needed?
    Write a command-line program in Python for {p}. | List the steps to build {p} as a first project.
    Write a README for {p} made by students. | Which functions would {p} need? Give names and one-line descriptions.
    Write a class in Python that is the core of {p}.
    """,
    "|",
)


def code_prompts(rng: random.Random) -> Iterator[str]:
    functions, languages, write_forms = Deck(rng, FUNCTIONS), Deck(rng, LANGUAGES), Deck(rng, WRITE_FORMS)
    tables, sql, sql_forms, shell, shell_forms = (
        Deck(rng, TABLES),
        Deck(rng, SQL_TASKS),
        Deck(rng, SQL_FORMS),
        Deck(rng, SHELL),
        Deck(rng, SHELL_FORMS),
    )
    snippets, snippet_forms, concepts, concept_forms = (
        Deck(rng, SNIPPETS),
        Deck(rng, SNIPPET_FORMS),
        Deck(rng, CONCEPTS),
        Deck(rng, CONCEPT_FORMS),
    )
    projects, project_forms, topics = Deck(rng, PROJECTS), Deck(rng, PROJECT_FORMS), Deck(rng, ALL_TOPICS)
    while True:
        roll = rng.random()
        if roll < 0.45:
            yield write_forms.deal().format(l=languages.deal(), f=functions.deal())
        elif roll < 0.67:
            language, code = snippets.deal()
            if rng.random() < 0.5:  # both fenced and bare code occur in real chats
                code = f"```{language.lower()}\n{code}\n```"
            other = next(x for x in iter(languages.deal, None) if x != language)
            yield snippet_forms.deal().replace("[]", "\n").replace("{l}", language).replace("{m}", other).replace("{c}", code)
        elif roll < 0.76:
            yield sql_forms.deal().format(t=tables.deal(), q=sql.deal())
        elif roll < 0.84:
            yield shell_forms.deal().format(s=shell.deal())
        elif roll < 0.93:
            yield concept_forms.deal().format(k=concepts.deal())
        else:
            yield project_forms.deal().format(p=projects.deal(), t=topics.deal())
