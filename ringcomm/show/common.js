// What the pages share. ringcomm/screen.py has the colours.
const COLORS = @COLORS@;
const data = JSON.parse(document.getElementById("data").textContent);
const main = document.getElementById("main");
const SVG = new Set(["svg", "g", "line", "path", "rect", "text", "title"]);

function make(name, attributes = {}, ...children) {
  const node = SVG.has(name)
    ? document.createElementNS("http://www.w3.org/2000/svg", name)
    : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

// A colour on white: `share` of it.
const mixed = (color, share) =>
  `rgb(${[1, 3, 5].map(at => Math.round(255 - (255 - parseInt(color.slice(at, at + 2), 16)) * share)).join(" ")})`;

const range = n => [...Array(n).keys()];
const paragraph = (...children) => make("p", {}, ...children);
const selectOf = (id, names) => make("select", {id}, ...names.map(name => make("option", {}, name)));
const inputOf = (type, id, min, max, value) => make("input", {type, id, min, max, value});
const label = (x, y, text, attributes = {}) =>
  make("text", {x, y, "text-anchor": "middle", "pointer-events": "none", ...attributes}, text);
const percent = share => `${+(100 * share).toPrecision(share < 0.1 ? 2 : 3)} %`;
const grouped = value => value.toLocaleString("en");

// Of most pages.
const title = make("p", {id: "title", "aria-live": "polite"});
const picture = make("figure", {id: "picture"});

// The whole number of an input, which is set to it.
function whole(input, least, most) {
  input.value = Math.max(least, Math.min(most, Math.round(+input.value) || least));
  return +input.value;
}

// A button that moves a slider to its end, in 12 s if it has many stops; input by hand ends that.
function playerOf(slider, draw) {
  const play = make("button", {id: "play", type: "button"}, "Play");
  let timer = null,
    stride = 1;
  const stop = () => {
    clearInterval(timer);
    timer = null;
    play.textContent = "Play";
  };
  const go = () => {
    slider.value = +slider.value + stride;
    if (slider.value === slider.max) stop();
    draw();
  };
  slider.addEventListener("input", () => {
    stop();
    draw();
  });
  play.addEventListener("click", () => {
    if (timer) return stop();
    if (slider.value === slider.max) slider.value = slider.min;
    play.textContent = "Pause";
    stride = Math.ceil((slider.max - slider.min) / 150);
    timer = setInterval(go, Math.min(900, (12000 * stride) / (slider.max - slider.min)));
    go();
  });
  return {play, stop};
}

const three = value => String(+value.toPrecision(3));

function bytes(count) {
  for (const [unit, size] of [
    ["GiB", 2 ** 30],
    ["MiB", 2 ** 20],
    ["KiB", 2 ** 10],
  ])
    if (count >= size) return `${three(count / size)} ${unit}`;
  return `${three(count)} B`;
}

const duration = us =>
  us >= 1e6 ? `${three(us / 1e6)} s` : us >= 1e3 ? `${three(us / 1e3)} ms` : `${three(us)} µs`;

// Of a phone, where pictures have smaller cells.
const isNarrow = () => document.documentElement.clientWidth < 600;

// A picture that shrinks until its text of 13 px has 11 px; below that width the figure scrolls.
const pictureOf = (width, height, label) =>
  make("svg", {
    viewBox: `0 0 ${width} ${height}`,
    width,
    style: `min-width: ${Math.ceil((width * 11) / 13)}px`,
    role: "img",
    "aria-label": label,
  });

// A line of names behind squares in their colours.
const legendOf = entries =>
  make(
    "p",
    {class: "legend"},
    ...entries.map(([name, color]) => make("span", {}, make("b", {style: `color: ${color}`}, "■ "), name)),
  );

function tableOf(head, rows) {
  const isText = head.map((_, at) => rows.some(cells => cells[at].length > 30));
  const row = (cells, kind) =>
    make("tr", {}, ...cells.map((cell, at) => make(kind, {class: isText[at] ? "text" : ""}, cell)));
  return make(
    "div",
    {class: "table"},
    make(
      "table",
      {},
      make("thead", {}, row(head, "th")),
      make("tbody", {}, ...rows.map(cells => row(cells, "td"))),
    ),
  );
}
