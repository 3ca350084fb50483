// A recorded job: for each rank the program's phases, and under them its calls with their waits.
const KINDS = {
  forward: COLORS.sky,
  backward: COLORS.yellow,
  optimizer: COLORS.green,
  call: COLORS.blue,
  message: COLORS.pink,
  wait: COLORS.orange,
};
const kindOf = event => (event.kind === "program" ? event.name : event.kind);
// Those of the recording; a job without marks has no phases.
const found = new Set(data.events.map(kindOf)),
  kinds = Object.keys(KINDS).filter(kind => found.has(kind)),
  columns = [...new Set(["wait", "call", ...kinds])].filter(kind => found.has(kind)); // for a phone
const LEFT = 90,
  WIDTH = isNarrow() ? 280 : 900,
  BAR = 20,
  WAIT = 6,
  ROW = 2 * BAR + 14;
const all = {
  begin: Math.min(...data.events.map(event => event.begin)),
  end: Math.max(...data.events.map(event => event.end)),
};
const view = {...all};

const button = (id, label, name) => make("button", {id, type: "button", "aria-label": name}, label);
const buttons = {
  earlier: button("earlier", "←", "earlier"),
  later: button("later", "→", "later"),
  closer: button("closer", "+", "closer"),
  farther: button("farther", "−", "farther"),
  whole: button("whole", "All", "the whole recording"),
};
const shown = make("p", {id: "shown", "aria-live": "polite"}),
  chosen = make("p", {id: "chosen"}, "Click a box for its name and times."),
  sums = make("div", {id: "sums"}),
  ring = make("figure", {id: "ring"});
main.append(
  paragraph(data.about),
  legendOf(kinds.map(kind => [kind, KINDS[kind]])),
  make("form", {}, ...Object.values(buttons)),
  shown,
  picture,
  chosen,
  make("h2", {}, "Time of each rank in what is shown"),
  sums,
  make("h2", {}, "Who waits for whom"),
  paragraph("An arrow goes from a rank to the one that it waited for; a thicker one is a longer wait."),
  ring,
);

const isIn = event => event.end > view.begin && event.begin < view.end;
const lengthIn = event => Math.min(event.end, view.end) - Math.max(event.begin, view.begin);

// Boxes of less than half a pixel are drawn once for each pixel.
function visible() {
  const scale = WIDTH / (view.end - view.begin),
    taken = new Map();
  return data.events.filter(event => {
    if (!isIn(event)) return false;
    if ((event.end - event.begin) * scale >= 0.5) return true;
    const key = `${event.rank}/${kindOf(event)}`,
      pixel = Math.floor((event.begin - view.begin) * scale);
    if (taken.get(key) === pixel) return false;
    taken.set(key, pixel);
    return true;
  });
}

function drawPicture() {
  const height = data.ranks.length * ROW,
    scale = WIDTH / (view.end - view.begin);
  const svg = pictureOf(LEFT + WIDTH + 4, height, `phases, calls and waits of ${data.ranks.length} ranks`);
  data.ranks.forEach((name, at) => {
    const y = at * ROW;
    svg.append(make("text", {x: LEFT - 8, y: y + BAR + 4, "text-anchor": "end"}, name));
    for (const top of [y, y + BAR + 2])
      svg.append(make("rect", {x: LEFT, y: top, width: WIDTH, height: BAR, fill: "var(--empty)"}));
  });
  const names = [];
  for (const event of visible()) {
    const x = LEFT + Math.max(0, (event.begin - view.begin) * scale),
      end = LEFT + Math.min(WIDTH, (event.end - view.begin) * scale),
      y = event.rank * ROW + (event.kind === "program" ? 0 : BAR + 2),
      inset = event.kind === "wait" ? BAR - WAIT : 0;
    const box = make("rect", {
      x,
      y: y + inset,
      width: Math.max(0.5, end - x),
      height: BAR - inset,
      fill: KINDS[kindOf(event)],
      class: "event",
      "data-rank": event.rank,
      "data-kind": kindOf(event),
    });
    box.append(make("title", {}, describe(event)));
    box.addEventListener("click", () => (chosen.textContent = describe(event)));
    svg.append(box);
    const style = `fill: ${event.kind === "call" ? "#fff" : "#1b1f24"}`;
    if (event.kind !== "wait" && end - x > 9 * event.name.length)
      names.push(make("text", {x: x + 4, y: y + 13, "pointer-events": "none", style}, event.name));
  }
  svg.append(...names);
  picture.replaceChildren(svg);
}

function describe(event) {
  const number = event.seq === null ? "" : ` #${event.seq}`,
    unfinished = event.unfinished ? ", not finished" : "";
  const from = duration(event.begin - all.begin);
  return `${data.ranks[event.rank]}: ${event.name}${number}, ${duration(event.end - event.begin)}, from ${from} on${unfinished}`;
}

// By rank: µs of each kind in the view; and [rank, peer] -> µs of waits.
function sumsIn() {
  const times = data.ranks.map(() => Object.fromEntries(kinds.map(kind => [kind, 0]))),
    waits = new Map();
  for (const event of data.events.filter(isIn)) {
    times[event.rank][kindOf(event)] += lengthIn(event);
    if (event.kind === "wait") {
      const key = `${event.rank}/${event.peer}`;
      waits.set(key, (waits.get(key) ?? 0) + lengthIn(event));
    }
  }
  return {times, waits};
}

// From the numbers of ranks in the job to rows, of which a rank may have several.
const rowOf = new Map(data.numbers.map((number, row) => [number, row]));

function drawRing(waits) {
  const n = data.ranks.length,
    radius = Math.max(70, 16 * n),
    middle = radius + 50;
  const at = row => {
    const angle = (2 * Math.PI * row) / n - Math.PI / 2;
    return [middle + radius * Math.cos(angle), middle + radius * Math.sin(angle)];
  };
  const svg = pictureOf(2 * middle, 2 * middle, "waits between ranks");
  const most = Math.max(...waits.values(), 1e-9);
  for (const [key, us] of waits) {
    const [row, peer] = key.split("/").map(Number),
      target = rowOf.get(peer);
    if (target === undefined || target === row || us === 0) continue;
    const [x0, y0] = at(row),
      [x1, y1] = at(target),
      length = Math.hypot(x1 - x0, y1 - y0),
      [dx, dy] = [(x1 - x0) / length, (y1 - y0) / length];
    // Beside the line between the ranks, so that both directions are seen.
    const [ax, ay] = [x0 + 22 * dx - 4 * dy, y0 + 22 * dy + 4 * dx],
      [bx, by] = [x1 - 24 * dx - 4 * dy, y1 - 24 * dy + 4 * dx];
    const head = `M${bx - 7 * dx - 5 * dy} ${by - 7 * dy + 5 * dx} L${bx} ${by} L${bx - 7 * dx + 5 * dy} ${by - 7 * dy - 5 * dx}`;
    const arrow = make("path", {
      d: `M${ax} ${ay} L${bx} ${by} ${head}`,
      fill: "none",
      stroke: COLORS.orange,
      "stroke-width": 1 + (5 * us) / most,
      class: "arrow",
      "data-from": row,
      "data-to": target,
    });
    arrow.append(make("title", {}, `${data.ranks[row]} waited ${duration(us)} for rank ${peer}`));
    svg.append(arrow);
  }
  data.ranks.forEach((name, row) => {
    const [x, y] = at(row);
    svg.append(make("rect", {x: x - 17, y: y - 17, width: 34, height: 34, rx: 17, fill: COLORS.blue}));
    svg.append(label(x, y + 5, String(data.numbers[row]), {style: "fill: #fff"}));
  });
  ring.replaceChildren(svg);
}

function draw() {
  const {times, waits} = sumsIn(),
    span = view.end - view.begin;
  shown.textContent = `Shown: ${duration(span)}, from ${duration(view.begin - all.begin)} on, of ${duration(all.end - all.begin)}.`;
  drawPicture();
  const cells = us => (us ? `${duration(us)} (${percent(us / span)})` : "");
  sums.replaceChildren(
    tableOf(
      ["", ...columns],
      data.ranks.map((name, row) => [name, ...columns.map(kind => cells(times[row][kind]))]),
    ),
  );
  drawRing(waits);
}

// The middle stays; nothing outside of the recording is shown, and no less than 1 µs.
function show(middle, span) {
  span = Math.min(all.end - all.begin, Math.max(1, span));
  view.begin = Math.min(Math.max(all.begin, middle - span / 2), all.end - span);
  view.end = view.begin + span;
  draw();
}

const move = (share, factor) =>
  show((view.begin + view.end) / 2 + share * (view.end - view.begin), (view.end - view.begin) * factor);
buttons.earlier.addEventListener("click", () => move(-0.5, 1));
buttons.later.addEventListener("click", () => move(0.5, 1));
buttons.closer.addEventListener("click", () => move(0, 0.5));
buttons.farther.addEventListener("click", () => move(0, 2));
buttons.whole.addEventListener("click", () => show((all.begin + all.end) / 2, all.end - all.begin));
draw();
