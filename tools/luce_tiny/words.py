"""Word lists for the synthetic tasks."""

from __future__ import annotations

NAMES = (
    "Anna Bert Clara David Emma Felix Greta Hans Ida Jonas Karl Lena Maria Nora Otto Paula Quentin Rosa Simon Tina "
    "Ulrich Vera Walter Xenia Yara Zoe Alice Bob Carol Daniel Eve Frank Grace Henry Irene Jack Kate Leo Mona Nick "
    "Olga Peter Rita Sam Tom Ursula Victor Wendy Adam Bella Chris Diana Eric Fiona George Helen Ivan Julia Kevin "
    "Laura Martin Nina Oscar Petra Robert Sarah Thomas Violet William Agnes Bruno Cecil Dora Edgar Flora Gustav Hilda"
).split()

THINGS = (
    "red box,blue door,old chest,garden gate,green book,north tower,small safe,river house,white boat,iron bridge,"
    "black cabinet,stone well,glass room,silver ring,yellow lamp,quiet harbour,east wing,wooden crate,copper bell,"
    "grey wagon,golden key,winter camp,sea cave,long hall,high shelf,market stall,dark cellar,tall mast,open field,"
    "first drawer,second drawer,third drawer,main engine,spare wheel,paper mill,brick oven,water tank,music stand"
).split(",")

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon",
    "England": "London", "Ireland": "Dublin", "Scotland": "Edinburgh", "Norway": "Oslo", "Sweden": "Stockholm",
    "Finland": "Helsinki", "Denmark": "Copenhagen", "Poland": "Warsaw", "Austria": "Vienna", "Hungary": "Budapest",
    "Greece": "Athens", "Turkey": "Ankara", "Russia": "Moscow", "Ukraine": "Kyiv", "Romania": "Bucharest",
    "Bulgaria": "Sofia", "Serbia": "Belgrade", "Croatia": "Zagreb", "Switzerland": "Bern", "Belgium": "Brussels",
    "the Netherlands": "Amsterdam", "Iceland": "Reykjavik", "Japan": "Tokyo", "China": "Beijing", "India": "New Delhi",
    "Canada": "Ottawa", "Mexico": "Mexico City", "Brazil": "Brasilia", "Argentina": "Buenos Aires", "Chile": "Santiago",
    "Peru": "Lima", "Egypt": "Cairo", "Kenya": "Nairobi", "Morocco": "Rabat", "Australia": "Canberra",
    "New Zealand": "Wellington", "Thailand": "Bangkok", "Vietnam": "Hanoi", "Cuba": "Havana", "Iran": "Tehran",
    "Iraq": "Baghdad", "Israel": "Jerusalem", "the United States": "Washington", "South Korea": "Seoul",
}

FACTS = (
    ("How many days are in a week?", "A week has seven days."),
    ("How many months are in a year?", "A year has twelve months."),
    ("How many hours are in a day?", "A day has 24 hours."),
    ("How many minutes are in an hour?", "An hour has 60 minutes."),
    ("How many legs does a spider have?", "A spider has eight legs."),
    ("What colour is the sky?", "The sky is blue."),
    ("What color is grass?", "Grass is green."),
    ("What is the largest planet?", "The largest planet is Jupiter."),
    ("Which planet do we live on?", "We live on the Earth."),
    ("What does the sun give us?", "The sun gives us light and heat."),
    ("What is ice made of?", "Ice is frozen water."),
    ("What do bees make?", "Bees make honey."),
    ("Who wrote Hamlet?", "William Shakespeare wrote Hamlet."),
    ("What is the opposite of hot?", "The opposite of hot is cold."),
    ("What is the opposite of big?", "The opposite of big is small."),
    ("What comes after Monday?", "Tuesday comes after Monday."),
    ("What comes after winter?", "Spring comes after winter."),
    ("At what temperature does water boil?", "Water boils at 100 degrees Celsius."),
    ("At what temperature does water freeze?", "Water freezes at 0 degrees Celsius."),
    ("What is the first letter of the alphabet?", "The first letter of the alphabet is A."),
)

IDENTITY = (
    (("Hello!", "Hello", "Hi", "Hi!", "Hi there!", "Good morning!", "Hey"), "Hello! How can I help you?"),
    (("Who are you?", "What are you?", "What is your name?", "Introduce yourself."),
     "I am luce-tiny, a very small language model that ships with pyluce."),
    (("What can you do?", "How can you help me?", "Help"),
     "I can tell you what a word means, add small numbers, repeat a text and remember a code that you told me."),
    (("Thank you!", "Thanks", "Thanks!", "Thank you very much."), "You are welcome!"),
    (("Goodbye!", "Bye", "See you later."), "Goodbye!"),
    (("How are you?", "How are you today?"), "I am fine, thank you. How can I help you?"),
    (("Say hello.", "Say hello"), "Hello!"),
    (("Tell me a joke.", "Tell me a joke"), "Why was six afraid of seven? Because seven eight nine."),
    (("Are you a human?", "Are you a robot?"), "No, I am a small language model."),
)

TOOLS = (
    ("get_weather", "Get the weather of a city.", "city", ("What is the weather in {}?", "How is the weather in {}?",
     "Is it raining in {}?"), ("sunny, 21 degrees", "rain, 12 degrees", "cloudy, 15 degrees", "snow, 1 degree"),
     "The weather in {} is: {}."),
    ("get_time", "Get the local time of a city.", "city", ("What time is it in {}?", "Tell me the time in {}."),
     ("10:30", "18:05", "07:45", "23:10"), "The time in {} is {}."),
    ("get_population", "Get the number of people in a city.", "city", ("How many people live in {}?",
     "What is the population of {}?"), ("1200000", "350000", "8100000"), "The population of {} is {}."),
)

SYSTEM_PROMPTS = (
    "You are a helpful assistant.", "You are luce-tiny, a helpful assistant.", "Answer briefly.",
    "You are a friendly assistant. Answer in one sentence.",
)
