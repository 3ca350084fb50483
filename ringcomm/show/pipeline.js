// A step of a pipeline by schedule: forward takes 1, backward 2, of which each half 1; idle time is
// what is not filled.
const SCHEDULES = {
  gpipe: {stages: 1, formula: (p, m) => [p - 1, m + p - 1, "(p − 1)/(m + p − 1)"]},
  "1f1b": {stages: 1, formula: (p, m) => [p - 1, m + p - 1, "(p − 1)/(m + p − 1)"]},
  interleaved: {stages: 2, formula: (p, m) => [p - 1, 2 * m + p - 1, "(p − 1)/(2m + p − 1)"]},
  "zero-bubble": {stages: 1, formula: (p, m) => [p - 1, 3 * m + p - 1, "(p − 1)/(3m + p − 1)"]},
};

// A rank's computations in order: [kind, stage, micro-batch].
function orderOf(schedule, p, m, rank) {
  const v = SCHEDULES[schedule].stages,
    total = m * v;
  const work = (kind, k) => {
    const row = Math.floor(k / p) % v,
      stage = p * (kind === "F" ? row : v - 1 - row) + rank;
    return [kind, stage, v === 1 ? k : Math.floor(k / (p * v)) * p + (k % p)];
  };
  const first =
    schedule === "gpipe" ? total : Math.min(total, v === 1 ? p - rank : (v - 1) * p + 2 * (p - 1 - rank) + 1);
  if (schedule === "zero-bubble") return halvesOf(p, m, rank);
  const order = range(first).map(k => work("F", k));
  for (const k of range(total)) {
    order.push(work("B", k));
    if (first + k < total) order.push(work("F", first + k));
  }
  return order;
}

// ZB-H1: as 1f1b, with the gradients of inputs first; those of weights fill what was idle.
function halvesOf(p, m, rank) {
  const first = Math.min(m, p - 1 - rank),
    late = Math.min(m, rank);
  const order = range(first).map(k => ["F", rank, k]);
  for (const k of range(m)) {
    if (first + k < m) order.push(["F", rank, first + k]);
    order.push(["I", rank, k]);
    if (k >= rank) order.push(["W", rank, k - rank]);
  }
  return [...order, ...range(late).map(k => ["W", rank, m - late + k])];
}

// Of one computation. The first stage has no gradients of inputs: its backward is all of weights.
const lengthOf = (kind, stage) => ({F: 1, B: 2, I: stage ? 1 : 0, W: stage ? 1 : 2})[kind];

// Every computation begins when its rank is free and its inputs are there.
function simulated(schedule, p, m) {
  const last = p * SCHEDULES[schedule].stages - 1,
    ends = new Map(),
    free = range(p).map(() => 0),
    actions = [];
  const waiting = range(p).map(rank => orderOf(schedule, p, m, rank).reverse());
  const needs = ([kind, stage, k]) =>
    kind === "F"
      ? stage
        ? [`F${stage - 1}/${k}`]
        : []
      : kind === "W"
        ? [`B${stage}/${k}`]
        : [`F${stage}/${k}`, ...(stage < last ? [`B${stage + 1}/${k}`] : [])];
  for (let before = -1; before < actions.length;) {
    before = actions.length;
    for (const rank of range(p))
      while (waiting[rank].length && needs(waiting[rank].at(-1)).every(need => ends.has(need))) {
        const [kind, stage, k] = waiting[rank].pop(),
          begin = Math.max(free[rank], ...needs([kind, stage, k]).map(need => ends.get(need)));
        free[rank] = begin + lengthOf(kind, stage);
        ends.set(`${kind === "I" ? "B" : kind}${stage}/${k}`, free[rank]);
        actions.push({rank, kind, stage, microBatch: k, begin, end: free[rank]});
      }
  }
  return actions;
}

function idleShare(actions, p) {
  const span = Math.max(...actions.map(one => one.end)) - Math.min(...actions.map(one => one.begin));
  return 1 - actions.reduce((sum, one) => sum + one.end - one.begin, 0) / (p * span);
}

// Pairs of micro-batch and stage whose activations a rank holds at the same time, at most.
function maxLive(actions, rank) {
  let live = 0,
    most = 0;
  for (const one of actions.filter(one => one.rank === rank).sort((a, b) => a.begin - b.begin)) {
    if (one.kind === "F") live += 1;
    else if (one.kind !== "I") live -= 1;
    most = Math.max(most, live);
  }
  return most;
}

const isRecorded = data.actions.length > 0;
const schedules = selectOf("schedule", Object.keys(SCHEDULES));
schedules.value = "1f1b";
const ranks = inputOf("number", "ranks", 1, data.max_ranks, data.ranks);
const batches = inputOf("number", "micro-batches", 1, data.max_micro_batches, data.micro_batches);
// By kind: of a rank's first stage, and of its second.
const STAGE_COLORS = {
  F: [COLORS.blue, COLORS.sky],
  B: [COLORS.orange, COLORS.yellow],
  I: [COLORS.orange, COLORS.yellow],
  W: [COLORS.green, COLORS.pink],
};
const KINDS = {F: "forward", B: "backward", I: "backward of inputs", W: "backward of weights"};
const idle = make("p", {id: "idle", "aria-live": "polite"}),
  live = make("p", {id: "live"});
const legend = make("div", {}),
  now = make("p", {id: "now", "aria-live": "polite"});
const slider = inputOf("range", "step", 0, 1, 1);
const {play, stop} = playerOf(slider, drawAll);
main.append(
  paragraph(
    isRecorded
      ? "A recorded step. Each row is a rank, each box one micro-batch in one stage."
      : "Each row is a rank, each box one micro-batch in one stage; a forward pass of a whole rank takes 1, a backward pass 2. Idle time is the bubble.",
  ),
  make(
    "form",
    {},
    ...(isRecorded
      ? []
      : [
          make("label", {}, "schedule", schedules),
          make("label", {}, "ranks p", ranks),
          make("label", {}, "micro-batches m", batches),
        ]),
    make("label", {}, "step", slider),
    play,
  ),
  legend,
  now,
  picture,
  idle,
  live,
);
if (!isRecorded)
  main.append(
    paragraph(
      "The first micro-batch reaches the last rank after p − 1 forwards, and its gradient comes back after p − 1 backwards: each rank waits for (p − 1) forwards and backwards of a step, ",
      "whatever m is. More micro-batches make that a smaller share. 1f1b idles as long as gpipe, but holds at most p micro-batches in place of m. ",
      "interleaved gives each rank 2 smaller stages, so that filling and draining take half as long. ",
      "zero-bubble halves the backward pass: the gradients of inputs, for which the rank before waits, come first, and those of weights, for which nobody waits, fill idle time.",
    ),
  );

function drawLegend(actions, p) {
  const found = new Set(actions.map(one => `${one.kind}${Math.floor(one.stage / p) % 2}`));
  const entries = Object.keys(KINDS).flatMap(kind => [
    [`${kind}0`, KINDS[kind], STAGE_COLORS[kind][0]],
    [`${kind}1`, `${KINDS[kind]} in a rank's second stage`, STAGE_COLORS[kind][1]],
  ]);
  const shown = entries.filter(([key]) => found.has(key)).map(([, name, color]) => [name, color]);
  legend.replaceChildren(legendOf([...shown, ["idle", "var(--line)"]]));
}

function draw(actions, p) {
  drawLegend(actions, p);
  const begin = Math.min(...actions.map(one => one.begin)),
    end = Math.max(...actions.map(one => one.end));
  const left = isNarrow() ? 60 : 70,
    width = isNarrow() ? 310 : 900,
    row = 30,
    scale = width / (end - begin);
  // The slider stops where a computation ends, and is at the end of the step first.
  const stops = [...new Set([begin, ...actions.map(one => one.end)])].sort((a, b) => a - b),
    isAtEnd = slider.value === slider.max;
  slider.max = stops.length - 1;
  if (isAtEnd) slider.value = slider.max;
  const time = stops[+slider.value];
  const svg = pictureOf(left + width + 4, p * (row + 6) + 4, `${p} ranks`);
  for (const rank of range(p)) {
    const y = rank * (row + 6);
    svg.append(label(left - 10, y + row / 2 + 4, `rank ${rank}`, {"text-anchor": "end"}));
    svg.append(make("rect", {x: left, y, width, height: row, fill: "var(--line)", class: "idle"}));
  }
  for (const one of actions) {
    const x = left + (one.begin - begin) * scale,
      y = one.rank * (row + 6),
      size = (one.end - one.begin) * scale;
    const box = make("rect", {
      x,
      y,
      width: size,
      height: row,
      class: "action",
      "fill-opacity": one.begin < time || time === end ? 1 : 0.25,
      fill: STAGE_COLORS[one.kind][Math.floor(one.stage / p) % 2],
      stroke: "var(--ground)",
      "data-rank": one.rank,
      "data-kind": one.kind,
      "data-stage": one.stage,
      "data-micro-batch": one.microBatch,
    });
    box.append(
      make("title", {}, `${KINDS[one.kind]} of micro-batch ${one.microBatch} in stage ${one.stage}`),
    );
    svg.append(box);
    const text = String(one.microBatch);
    if (size > 8 * text.length)
      svg.append(
        label(x + size / 2, y + row / 2 + 4, text, {
          style: Math.floor(one.stage / p) % 2 ? "fill: #1b1f24" : "fill: #fff",
        }),
      );
  }
  if (time < end) {
    const x = left + (time - begin) * scale;
    svg.append(make("line", {x1: x, x2: x, y1: 0, y2: p * (row + 6), stroke: "var(--ink)", "stroke-width": 2}));
  }
  const running = actions.filter(one => one.begin < time && one.end >= time).length;
  slider.setAttribute("aria-valuetext", `${slider.value} of ${slider.max}`);
  now.textContent = `${slider.value} of ${slider.max}: until here ${actions.filter(one => one.end <= time).length} of ${actions.length} computations are done${running ? `; ${p - running} of ${p} ranks idled just before` : ""}.`;
  picture.replaceChildren(svg);
  live.textContent = `Stored activations at most (one per micro-batch and stage): ${range(p)
    .map(rank => maxLive(actions, rank))
    .join(", ")} on ranks 0 to ${p - 1}.`;
}

function drawAll() {
  if (isRecorded) {
    draw(data.actions, data.ranks);
    idle.textContent = `Idle: ${percent(idleShare(data.actions, data.ranks))} of all ranks' time.`;
    return;
  }
  const p = whole(ranks, 1, data.max_ranks);
  let m = whole(batches, 1, data.max_micro_batches);
  if (schedules.value !== "gpipe") m = Math.max(m, p);
  if (schedules.value === "interleaved") m = Math.ceil(m / p) * p;
  batches.value = m;
  const actions = simulated(schedules.value, p, m),
    [over, under, formula] = SCHEDULES[schedules.value].formula(p, m);
  draw(actions, p);
  idle.textContent = `Idle: ${formula} = ${over}/${under} = ${percent(over / under)}; in the picture ${percent(idleShare(actions, p))}.`;
}

for (const input of [schedules, ranks, batches])
  input.addEventListener("change", () => {
    stop();
    slider.value = slider.max;
    drawAll();
  });
drawAll();
