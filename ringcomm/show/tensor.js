// One transformer block over N tensor-parallel ranks: who has which part, and its four collectives.
const {model, hidden, query, key_value: keyValue, ffn, num_inner: numInner, tokens} = data;
const inner = numInner === 2 ? "up, gate" : "up";
// Operations of a forward pass; a width of null is the hidden size on every rank, others are split.
const OPS = [
  {name: "norm", short: "norm", says: "every rank computes the same", width: null},
  {
    name: "query, key, value",
    short: "QKV",
    says: "column-parallel: a rank has its heads' columns of the weights",
    width: query + 2 * keyValue,
    weight: hidden * (query + 2 * keyValue),
  },
  {name: "attention", short: "attn", says: "a rank's own heads", width: query},
  {
    name: "output projection",
    short: "out",
    says: "row-parallel: a rank's product is one term of the sum",
    width: null,
    weight: hidden * query,
    isTerm: true,
  },
  {name: "all_reduce", short: "sum", says: "forward 1: the terms become the sum", collective: "forward"},
  {name: "norm", short: "norm", says: "every rank computes the same", width: null},
  {
    name: inner,
    short: "up",
    says: "column-parallel: a rank has some columns",
    width: numInner * ffn,
    weight: numInner * hidden * ffn,
  },
  {
    name: "down",
    short: "down",
    says: "row-parallel: a rank's product is one term of the sum",
    width: null,
    weight: hidden * ffn,
    isTerm: true,
  },
  {name: "all_reduce", short: "sum", says: "forward 2: the terms become the sum", collective: "forward"},
];
// Backward: a column-parallel layer gives each rank one term of its input's gradient.
const back = (short, width, says, isTerm = false) => ({
  ...OPS.find(op => op.short === short),
  width,
  says,
  isTerm,
});
const BACKWARD = [
  back("down", ffn, "the gradient of a rank's own columns"),
  back("up", null, "one term of the input's gradient", true),
  back("sum", null, `backward 1: the gradient before ${inner}`),
  back("norm", null, "every rank computes the same"),
  back("out", query, "the gradient of a rank's own heads"),
  back("attn", query + 2 * keyValue, "a rank's own heads"),
  back("QKV", null, "one term of the input's gradient", true),
  back("sum", null, "backward 2: the gradient before query, key and value"),
  back("norm", null, "every rank computes the same"),
];
const ALL = [
  ...OPS.map(op => ({...op, pass: "forward"})),
  ...BACKWARD.map(op => ({...op, pass: "backward"})),
];
const ranks = inputOf("number", "ranks", 1, data.max_ranks, data.ranks);
const slider = inputOf("range", "step", 1, ALL.length, 1);
const facts = make("p", {id: "facts"});
main.append(
  paragraph(
    `A block of ${model}: hidden size ${grouped(hidden)}, inner size ${grouped(ffn)}, ${grouped(tokens)} tokens in bfloat16. `,
    "Blue: complete, the same on every rank. Yellow: a rank's own part. Orange: one term of a sum. A frame around all ranks is a collective. ",
    "QKV is the query, key and value projections, attn attention, out the output projection. ",
    `The MLP has ${numInner === 2 ? "up (with the gate)" : "up"} and down. A sum is an all_reduce.`,
  ),
  make("form", {}, make("label", {}, "ranks N", ranks), make("label", {}, "step", slider), playerOf(slider, drawAll).play),
  title,
  picture,
  facts,
  paragraph(
    "Column-parallel and then row-parallel: between the two no rank needs what another one has, so a block has two all_reduces in the forward and two in the backward pass. ",
    "With the sequence split between the blocks, each all_reduce becomes a reduce_scatter and an all_gather of the same bytes, and norms are split, too.",
  ),
);

function drawAll() {
  const n = whole(ranks, 1, data.max_ranks),
    at = +slider.value - 1;
  // On a phone names of neighbours are on two lines, and do not touch.
  const width = isNarrow() ? 31 : 58,
    height = n > 8 ? 18 : 28,
    left = isNarrow() ? 52 : 62,
    second = isNarrow() ? 14 : 0,
    passHeight = n * (height + 4) + 50 + second;
  const svg = pictureOf(
    left + OPS.length * (width + 4) + 4,
    2 * passHeight,
    `${n} ranks, ${ALL.length} operations`,
  );
  const places = {forward: {x: left, y: 0}, backward: {x: left, y: passHeight}};
  for (const [pass, {x, y}] of Object.entries(places)) {
    svg.append(make("text", {x, y: y + 14}, pass));
    for (const rank of range(n))
      svg.append(
        label(left - 8, y + 24 + rank * (height + 4) + height / 2 + 4, `rank ${rank}`, {"text-anchor": "end"}),
      );
  }
  ALL.forEach((op, idx) => {
    const place = places[op.pass],
      x = place.x + (idx % OPS.length) * (width + 4),
      top = place.y + 24,
      ink = idx === at ? "var(--ink)" : "var(--line)";
    for (const rank of range(n)) {
      const color = op.collective
        ? COLORS.blue
        : op.isTerm && n > 1
          ? COLORS.orange
          : op.width && n > 1
            ? COLORS.yellow
            : COLORS.blue;
      svg.append(
        make("rect", {
          x,
          y: top + rank * (height + 4),
          width,
          height,
          rx: 3,
          fill: color,
          "fill-opacity": idx <= at ? 1 : 0.6,
          stroke: ink,
          "stroke-width": idx === at ? 2 : 1,
        }),
      );
    }
    const under = top + n * (height + 4) + 18 + (idx % OPS.length % 2) * second;
    svg.append(label(x + width / 2, under, op.short, {class: "faint"}));
    if (op.collective)
      svg.append(
        make("rect", {
          x: x - 2,
          y: top - 2,
          width: width + 4,
          height: n * (height + 4),
          rx: 4,
          fill: "none",
          stroke: COLORS.pink,
          "stroke-width": 3,
          class: "collective",
          "data-pass": op.pass,
        }),
      );
  });
  picture.replaceChildren(svg);
  const op = ALL[at];
  slider.setAttribute("aria-valuetext", op.name);
  title.textContent = `${at + 1} of ${ALL.length}, ${op.pass}: ${op.name} (${op.says})`;
  const buffer = 2 * tokens * hidden,
    sent = ((2 * (n - 1)) / n) * buffer;
  const weight = op.weight
    ? ` ${op.pass === "forward" ? "Weights" : "Their gradients"}: ${bytes((2 * op.weight) / n)} on each rank, of ${bytes(2 * op.weight)}.`
    : "";
  const output = op.collective
    ? `The buffer has ${bytes(buffer)}, of which a rank receives 2(N − 1)/N: ${bytes(sent)}.`
    : `Output: ${grouped(tokens)} × ${grouped(op.width ? Math.ceil(op.width / n) : hidden)} on each rank.`;
  facts.textContent = `${output}${weight} In the whole block a rank receives ${bytes(4 * sent)} in 4 all_reduces.`;
}

ranks.addEventListener("input", drawAll);
drawAll();
