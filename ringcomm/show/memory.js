// Bytes of a rank by training system and number of ranks, stacked.
const PARTS = {
  parameters: ["weights", COLORS.blue],
  gradients: ["gradients", COLORS.orange],
  states: ["optimizer states", COLORS.green],
  activations: ["activations", COLORS.yellow],
  buffers: ["temporary", COLORS.pink],
};
// How a system is written, and what a rank has.
const SYSTEMS = {
  ddp: ["DDP", "everything on every rank; temporary: buckets, a second copy of the gradients"],
  zero1: ["ZeRO-1", "master weights and optimizer states / N; gradients in float32, twice DDP's: micro-batches are added up in them (reduce_dtype= chooses another type)"],
  zero2: ["ZeRO-2", "master weights, states and gradients / N; temporary: one bucket of complete gradients"],
  zero3: ["ZeRO-3", "all weights, in float32, gradients and states / N; temporary: one layer's weights"],
  lomo: ["LOMO", "bfloat16 weights; no states; one gradient at a time, and its float32 copy for the sum"],
  "lomo-shards": ["LOMO on shards", "LOMO with weights / N; temporary: one layer's weights"],
};
const counts = [...new Set(data.rows.map(row => row.ranks))];
const slider = inputOf("range", "ranks", 0, counts.length - 1, Math.min(2, counts.length - 1));
const table = make("div", {id: "table"});
main.append(
  paragraph(`${data.model} has ${three(data.num_params / 1e9)} billion weights. `, data.about),
  make("form", {}, make("label", {}, "ranks", slider), playerOf(slider, drawAll).play),
  title,
  legendOf(Object.values(PARTS)),
  picture,
  table,
  make("h2", {}, "What a rank has"),
  tableOf(["system", "memory of a rank"], Object.values(SYSTEMS)),
  paragraph(
    "These are predictions of zero.predict_memory() and of the planner, for the rank that needs most. Activations do not shrink with N: each rank has its own batch.",
  ),
);

function drawAll() {
  const n = counts[+slider.value],
    rows = data.rows.filter(row => row.ranks === n);
  slider.setAttribute("aria-valuetext", `${n} ranks`);
  title.textContent = `${n} ranks`;
  const total = row => Object.keys(PARTS).reduce((sum, part) => sum + row[part], 0),
    most = Math.max(...data.rows.map(total));
  const left = isNarrow() ? 120 : 125,
    width = isNarrow() ? 170 : 620,
    height = 30;
  const svg = pictureOf(left + width + (isNarrow() ? 75 : 110), rows.length * (height + 8), `memory with ${n} ranks`);
  rows.forEach((row, idx) => {
    const y = idx * (height + 8);
    let x = left;
    svg.append(label(left - 10, y + 20, SYSTEMS[row.system][0], {"text-anchor": "end"}));
    for (const [part, [name, color]] of Object.entries(PARTS)) {
      const size = (row[part] / most) * width,
        bar = make("rect", {
          x,
          y,
          width: size,
          height,
          fill: color,
          class: "part",
          "data-system": row.system,
          "data-part": part,
          "data-bytes": row[part],
        });
      bar.append(make("title", {}, `${name}: ${bytes(row[part])}`));
      svg.append(bar);
      x += size;
    }
    svg.append(make("text", {x: x + 8, y: y + 20}, bytes(total(row))));
  });
  picture.replaceChildren(svg);
  table.replaceChildren(
    tableOf(
      ["system", "in all", ...Object.values(PARTS).map(([name]) => name)],
      rows.map(row => [
        SYSTEMS[row.system][0],
        bytes(total(row)),
        ...Object.keys(PARTS).map(part => bytes(row[part])),
      ]),
    ),
  );
}

drawAll();
