// An all_reduce of N ranks, step by step: which parts of the sum each rank has of each chunk.
// The steps of the ring are those of csrc/collectives/ring.h; a test compares them with a trace.
// Up to so many ranks a cell lists the ranks of its sum, and up to so many it counts them.
const cellTexts = () => (isNarrow() ? 4 : 8),
  COUNT_TEXTS = 20;
const mod = (value, n) => ((value % n) + n) % n;

// Steps of moves; `adds`: the target adds what it receives to its own part, otherwise it keeps it.
// A ring's steps have the names that they have in a trace.
const ALGORITHMS = {
  ring(n) {
    const moves = (adds, chunkOf) =>
      range(n).map(to => ({from: mod(to - 1, n), to, chunk: mod(chunkOf(to), n), adds}));
    return [
      ...range(n - 1).map(k => ({
        half: "reduce_scatter",
        name: `reduce_scatter step ${k + 1}`,
        said: ` (reduce_scatter ${k + 1} of ${n - 1})`,
        moves: moves(true, to => to - 2 - k),
      })),
      ...range(n - 1).map(k => ({
        half: "all_gather",
        name: `all_gather step ${k + 1}`,
        said: ` (all_gather ${k + 1} of ${n - 1})`,
        moves: moves(false, to => to - 1 - k),
      })),
    ];
  },
  two_shot(n) {
    const others = (adds, chunkOf) =>
      range(n).flatMap(to =>
        range(n)
          .filter(from => from !== to)
          .map(from => ({from, to, chunk: chunkOf(from, to), adds})),
      );
    return [
      {
        half: "reduce_scatter",
        said: ": rank r reads chunk r of every rank",
        moves: others(true, (from, to) => to),
      },
      {
        half: "all_gather",
        said: ": each rank reads the complete chunks of the others",
        moves: others(false, from => from),
      },
    ];
  },
  one_shot(n) {
    const moves = range(n).flatMap(to =>
      range(n)
        .filter(from => from !== to)
        .flatMap(from => range(n).map(chunk => ({from, to, chunk, adds: true}))),
    );
    return [{half: "all_reduce", said: ": each rank reads the whole buffer of every rank", moves}];
  },
};

// parts[rank][chunk] is the set of ranks whose values are in the sum, after so many steps.
function partsAfter(n, steps, count) {
  let parts = range(n).map(rank => range(n).map(() => new Set([rank])));
  for (const step of steps.slice(0, count)) {
    const next = parts.map(row => row.map(set => new Set(set)));
    for (const {from, to, chunk, adds} of step.moves) {
      if (!adds) next[to][chunk] = new Set(parts[from][chunk]);
      else for (const rank of parts[from][chunk]) next[to][chunk].add(rank);
    }
    parts = next;
  }
  return parts;
}

// In parts of the buffer that each rank has received after so many steps.
const receivedAfter = (n, steps, count) =>
  steps.slice(0, count).reduce((sum, step) => sum + step.moves.length / n / n, 0);

const state = {algorithm: "ring", ranks: data.ranks, count: 0};
const select = selectOf("algorithm", Object.keys(ALGORITHMS));
const ranks = inputOf("number", "ranks", 2, data.max_ranks, state.ranks);
const slider = inputOf("range", "step", 0, 1, 0);
const {play, stop} = playerOf(slider, () => go(+slider.value));
const sent = make("p", {id: "sent"}),
  cells = make("p", {id: "cells"});
const halves = make("div", {id: "halves", class: "halves"});
const waits = make("p", {id: "waits"}),
  compared = make("div", {id: "compared"});
const recorded = make(
  "p",
  {id: "recorded"},
  `A recording of ${data.recorded}. Below the picture: which rank waited in the step, for which, and how long.`,
);
// Not for other ranks or another algorithm than those of the recording.
const isRecorded = n => data.recorded !== "" && n === data.ranks && state.algorithm === "ring";
main.append(
  recorded,
  paragraph(
    "Every rank has a buffer, cut into one chunk per rank. At the end each rank has the sum of all buffers. ",
    "A step changes the cells with a bold frame; arrows and dashed frames show where the data comes from. In shared memory nothing is sent: a rank reads what the others have.",
  ),
  make(
    "form",
    {},
    make("label", {}, "algorithm", select),
    make("label", {}, "ranks", ranks),
    make("label", {}, "step", slider),
    play,
  ),
  halves,
  title,
  cells,
  legendOf([
    ["one rank's own values", "var(--empty)"],
    ["partial sum", COLORS.yellow],
    ["complete sum", COLORS.blue],
  ]),
  picture,
  sent,
  waits,
  make("h2", {}, "The three algorithms"),
  compared,
);

function drawPicture(n, steps) {
  const parts = partsAfter(n, steps, state.count),
    step = steps[state.count - 1],
    moves = step?.moves ?? [];
  const isListed = n <= cellTexts(),
    hasArrows = isListed && state.algorithm === "ring";
  const sizes = isNarrow()
    ? {listed: [54, 40, 16], counted: [30, 26, 6], nameEnd: n > 10 ? 62 : 52}
    : {listed: [96, 40, 36], counted: [44, 26, 10], nameEnd: 66};
  const [width, height, gap] = isListed ? sizes.listed : n <= COUNT_TEXTS ? sizes.counted : [14, 14, 2];
  const left = sizes.nameEnd + 10 + (hasArrows ? gap : 0),
    top = 28;
  const x = rank => left + rank * (width + gap),
    y = chunk => top + chunk * (height + 6);
  const svg = pictureOf(
    x(n) + 20,
    y(n) + 4,
    `${n} ranks, ${n} chunks, after ${state.count} of ${steps.length} steps`,
  );
  const moved = new Set(moves.map(({to, chunk}) => `${to}/${chunk}`));
  const isRead = new Set(hasArrows ? [] : moves.map(({from, chunk}) => `${from}/${chunk}`));
  const every = n <= COUNT_TEXTS ? 1 : 8;
  for (const i of range(n)) {
    if (i % every) continue;
    svg.append(
      label(x(i) + width / 2, top - 10, isListed ? `rank ${i}` : String(i)),
      label(sizes.nameEnd, y(i) + height / 2 + 4, `chunk ${i}`, {"text-anchor": "end", class: "faint"}),
    );
  }
  for (const rank of range(n))
    for (const chunk of range(n)) {
      const has = [...parts[rank][chunk]].sort((a, b) => a - b),
        isComplete = has.length === n;
      const place = `${rank}/${chunk}`,
        isMarked = moved.has(place) || isRead.has(place);
      const cell = make("rect", {
        x: x(rank),
        y: y(chunk),
        width,
        height,
        rx: 4,
        class: "cell",
        "data-rank": rank,
        "data-chunk": chunk,
        "data-parts": has.join("+"),
        fill: isComplete
          ? COLORS.blue
          : has.length === 1
            ? "var(--empty)"
            : mixed(COLORS.yellow, 0.3 + (0.6 * has.length) / n),
        stroke: moved.has(place) ? "var(--ink)" : isRead.has(place) ? COLORS.orange : "var(--line)",
        "stroke-width": isMarked ? 2 : 1,
        "stroke-dasharray": isRead.has(place) && !moved.has(place) ? "4 3" : "",
      });
      cell.append(
        make(
          "title",
          {},
          `rank ${rank}, chunk ${chunk}: ${isComplete ? "the complete sum" : `the sum of ranks ${has.join(", ")}`}`,
        ),
      );
      svg.append(cell);
      const text = isListed ? (isComplete ? "sum" : has.join("+")) : n <= COUNT_TEXTS ? `${has.length}` : "";
      if (text)
        svg.append(
          label(
            x(rank) + width / 2,
            y(chunk) + height / 2 + 4,
            text,
            has.length > 1 ? {style: `fill: ${isComplete ? "#fff" : "#1b1f24"}`} : {},
          ),
        );
    }
  if (hasArrows)
    for (const {from, to, chunk, adds} of moves) {
      const at = y(chunk) + height / 2;
      const arrow = (a, b) =>
        make("path", {
          d: `M${a} ${at} H${b - 7} m-1 -5 l8 5 l-8 5`,
          fill: "none",
          "stroke-width": 2,
          stroke: adds ? COLORS.orange : COLORS.blue,
          class: "arrow",
          "data-from": from,
          "data-to": to,
          "data-chunk": chunk,
        });
      const begin = x(from) + width + 3,
        end = x(to) - 3;
      if (to === from + 1) svg.append(arrow(begin, end));
      else svg.append(arrow(begin, begin + gap - 6), arrow(end - gap + 6, end)); // from the last rank to the first
    }
  picture.replaceChildren(svg);
}

function waitText(n, step) {
  if (!step) return "";
  const measured = data.measured.filter(one => one.step === step.name);
  if (measured.length && isRecorded(n)) {
    const said = measured
      .filter(one => one.wait_us > 0)
      .map(one => `${one.rank} waited ${duration(one.wait_us)} for ${one.peer}`);
    const longest = Math.max(...measured.map(one => one.us));
    return `In the recorded run: ${said.join(", ") || "nobody waited"}; the step took ${duration(longest)} on the slowest rank.`;
  }
  if (state.algorithm === "ring")
    return state.count === 1
      ? "Rank r waits for the first chunk of rank r − 1."
      : `Rank r waits until rank r − 1 has ended ${state.count === n ? "the reduce_scatter" : "the step before"}: the slowest rank sets the pace of all.`;
  return "A rank waits until every other rank has come here.";
}

function drawAll() {
  const n = state.ranks,
    steps = ALGORITHMS[state.algorithm](n),
    step = steps[state.count - 1];
  recorded.hidden = !isRecorded(n);
  slider.max = steps.length;
  slider.value = state.count;
  slider.setAttribute("aria-valuetext", step ? `step ${state.count}${step.said}` : "before the first step");
  title.textContent = step
    ? `Step ${state.count} of ${steps.length}${step.said}`
    : `Before the first of ${steps.length} steps: each rank has its own values.`;
  const lengths = steps.reduce((found, {half}) => ({...found, [half]: (found[half] ?? 0) + 1}), {});
  halves.replaceChildren(
    ...Object.entries(lengths).map(([half, length]) =>
      make(
        "span",
        {
          class: step?.half === half ? "now" : "",
          style: `flex: ${length}; border-color: ${half === "all_gather" ? COLORS.blue : COLORS.orange}`,
        },
        `${half}: ${length === 1 ? "1 step" : `${length} steps`}`,
      ),
    ),
  );
  cells.textContent =
    n <= cellTexts()
      ? "A cell lists the ranks whose values its sum includes."
      : n <= COUNT_TEXTS
        ? "The number in a cell says how many ranks' values its sum includes."
        : "Point at a cell to see the ranks whose values its sum includes.";
  drawPicture(n, steps);
  const total = receivedAfter(n, steps, steps.length),
    now = receivedAfter(n, steps, state.count);
  const formula =
    state.algorithm === "one_shot"
      ? `N − 1 = ${n - 1}`
      : `2(N − 1)/N = ${2 * (n - 1)}/${n} = ${three(total)}`;
  sent.textContent = `Each rank has received ${three(now)} × the buffer (${bytes(now * data.bytes)}; a buffer has ${bytes(data.bytes)}). At the end: ${formula}.`;
  waits.textContent = waitText(n, step);
  compared.replaceChildren(
    tableOf(
      ["algorithm", "steps", "buffers received by a rank", `of ${bytes(data.bytes)}`],
      Object.entries(ALGORITHMS).map(([name, of]) => {
        const all = of(n),
          part = receivedAfter(n, all, all.length);
        return [
          name,
          String(all.length),
          name === "one_shot" ? `N − 1 = ${n - 1}` : `2(N − 1)/N = ${three(part)}`,
          bytes(part * data.bytes),
        ];
      }),
    ),
    paragraph(
      "In each step of the ring a rank receives one chunk, 1/N of the buffer. Summing takes N − 1 steps, passing the sums around N − 1 more: 2(N − 1)/N. No algorithm needs less on its busiest rank: all ranks together must receive 2(N − 1) buffers. ",
      "two_shot receives as much in two steps, each from all other ranks. one_shot has one step, so it is the fastest for small buffers.",
    ),
  );
}

function go(count) {
  state.count = count;
  drawAll();
}

select.addEventListener("change", () => {
  stop();
  state.algorithm = select.value;
  go(0);
});
ranks.addEventListener("change", () => {
  stop();
  state.ranks = whole(ranks, 2, data.max_ranks);
  go(0);
});
drawAll();
