// The schedule as lanes of boxes over time, on a canvas: a step may have two hundred thousand.

const LEFT = 128, RIGHT = 62, AXIS = 22, GAP = 2; // pixels: labels, shares, time axis, between lanes
const MIN_LANE = 12, MAX_LANE = 40, ONE_LANE = 64, WANTED_HEIGHT = 420;
const MAX_ZOOM = 1e5, WIDE = 3; // pixels from which a box is drawn as itself

// A lane with arrays: start of every box (and the end of the last), activity, microbatch or -1.
function decodeLane(lane) {
  const count = lane.boxes.length;
  const start = new Float64Array(count + 1);
  const activity = new Uint8Array(count), microbatch = new Int32Array(count);
  const busy = new Float64Array(plan.timeline.activities.length);
  const tick = plan.timeline.tick_s;
  let ticks = 0, current = 0;
  for (let i = 0; i < count; i++) {
    const [what, length, step] = lane.symbols[lane.boxes[i]];
    if (step !== null) current += step;
    activity[i] = what;
    microbatch[i] = step === null ? -1 : current;
    busy[what] += length * tick;
    ticks += length;
    start[i + 1] = ticks * tick;
  }
  return { stage: lane.stage, start, activity, microbatch, count, busy };
}

const LANES = plan.timeline.lanes.map(decodeLane);
// Seconds between equal passes of consecutive microbatches once a pipeline is full.
const PERIOD_S = Math.max(...plan.stages.map((stage) => stage.forward_s + stage.backward_s));
const BUBBLE = plan.timeline.activities.indexOf("bubble");
const view = { from: 0, to: plan.timeline.end_s, cursor: -1 };

// The lanes shown, and the pixels of each.
function shownLanes() {
  const lanes = LANES.filter((lane) => isShown(lane.stage));
  const fitting = Math.floor(WANTED_HEIGHT / lanes.length) - GAP;
  const height = selection.stage === null
    ? Math.max(MIN_LANE, Math.min(MAX_LANE, fitting)) : ONE_LANE;
  return { lanes, height };
}

// Index of the box of a lane at a time, or its number of boxes after the last.
function boxAt(lane, time) {
  let low = 0, high = lane.count;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (lane.start[middle + 1] > time) high = middle;
    else low = middle + 1;
  }
  return low;
}

// What a box is, in words.
function describeBox(lane, i) {
  const stage = plan.stages[lane.stage];
  const where = `stage ${lane.stage} (ranks ${stage.ranks}, ${stage.mesh})`;
  const end_s = plan.timeline.end_s;
  const [from, to] = i < lane.count ? [lane.start[i], lane.start[i + 1]] : [lane.start[i], end_s];
  const activity = i < lane.count ? lane.activity[i] : BUBBLE;
  const batch = i < lane.count && lane.microbatch[i] >= 0 ? ` of microbatch ${lane.microbatch[i]}` : "";
  const what = plan.timeline.activities[activity] + batch;
  return `${where}\n${what}: ${formatSeconds(to - from)}\n` +
    `from ${short(from * 1e3, 7)} to ${short(to * 1e3, 7)} ms`;
}

// Colours of the activities as the theme has them now.
function activityColours() {
  const idle = getComputedStyle(document.body).getPropertyValue("--idle").trim();
  return plan.timeline.activities.map((name) => {
    const value = plan.colours.activity[name];
    return value === plan.colours.idle ? idle : value;
  });
}

// A colour as the 32 bits of a pixel.
function pixelOf(hex) {
  const [r, g, b] = channels(hex);
  return new Uint32Array(new Uint8Array([r, g, b, 255]).buffer)[0];
}

// The narrow boxes of a lane as a picture: each column is stacked, from below, by the share of its
// time that goes to each activity; the rest, on top, is bubble.
function columnPicture(covered, kinds, width, height, colours) {
  const picture = new ImageData(width, height), pixels = new Uint32Array(picture.data.buffer);
  const packed = colours.map(pixelOf);
  pixels.fill(packed[BUBBLE]);
  for (let c = 0; c < width; c++) {
    let sum = 0, filled = 0;
    for (let kind = 0; kind < kinds; kind++) {
      sum += covered[c * kinds + kind];
      const upTo = Math.min(Math.round(sum * height), height);
      for (; filled < upTo; filled++) pixels[(height - 1 - filled) * width + c] = packed[kind];
    }
  }
  return picture;
}

// Averages what columns are covered by over `window` columns around each, so that microbatches of
// a few pixels do not make a pattern that depends on the zoom.
function averaged(covered, kinds, columns, window) {
  const smooth = new Float32Array(covered.length), sums = new Float64Array(columns + 1);
  const upTo = (x) => sums[Math.floor(x)] + (x % 1 && (x % 1) * (sums[Math.ceil(x)] - sums[Math.floor(x)]));
  for (let kind = 0; kind < kinds; kind++) {
    for (let c = 0; c < columns; c++) sums[c + 1] = sums[c] + covered[c * kinds + kind];
    for (let c = 0; c < columns; c++) {
      const from = Math.max(c + 0.5 - window / 2, 0), to = Math.min(c + 0.5 + window / 2, columns);
      smooth[c * kinds + kind] = (upTo(to) - upTo(from)) / (to - from);
    }
  }
  return smooth;
}

// Draws one lane in the pixels of the screen: narrow boxes as columns, then the wide ones.
function drawLane(context, lane, y, height, width, ratio, colours) {
  const kinds = colours.length, columns = Math.round(width * ratio);
  const scale = columns / (view.to - view.from);
  const covered = new Float32Array((columns + 1) * kinds);
  const wide = [], window = PERIOD_S * scale, blurred = window < 4 * WIDE * ratio;
  for (let i = boxAt(lane, view.from); i < lane.count && lane.start[i] < view.to; i++) {
    const what = lane.activity[i];
    if (what === BUBBLE) continue;
    const left = Math.max((lane.start[i] - view.from) * scale, 0);
    const right = Math.min((lane.start[i + 1] - view.from) * scale, columns);
    if (right - left >= WIDE * ratio && !(blurred && lane.microbatch[i] >= 0)) {
      wide.push([i, Math.round(left) / ratio, Math.round(right) / ratio]);
      continue;
    }
    for (let c = Math.floor(left); c < right; c++) {
      covered[c * kinds + what] += Math.min(right, c + 1) - Math.max(left, c);
    }
  }
  const rows = Math.round((y + height) * ratio) - Math.round(y * ratio);
  const shares = blurred ? averaged(covered, kinds, columns, Math.max(window, 1)) : covered;
  context.putImageData(columnPicture(shares, kinds, columns, rows, colours),
    Math.round(LEFT * ratio), Math.round(y * ratio));
  context.font = `${Math.min(height - 2, 12)}px sans-serif`;
  for (const [i, left, right] of wide) {
    const background = colours[lane.activity[i]];
    context.fillStyle = background;
    context.fillRect(LEFT + left, y, right - left - (right - left > 6 ? 1 : 0), height);
    const text = String(lane.microbatch[i]);
    if (lane.microbatch[i] < 0 || height < 10) continue;
    if (context.measureText(text).width + 4 > right - left) continue;
    context.fillStyle = inkOn(background);
    context.fillText(text, LEFT + (left + right) / 2, y + height / 2 + 0.5);
  }
}

// Times for the axis: about `wanted` of them, at 1, 2 or 5 times a power of ten.
function axisTimes(from, to, wanted) {
  const rough = (to - from) / wanted, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
  const times = [];
  for (let n = Math.ceil(from / step); n * step <= to; n++) times.push(n * step);
  return { times, step };
}

// Draws the axis of time, in one unit.
function drawAxis(context, width, bottom, ink, line) {
  const { times, step } = axisTimes(view.from, view.to, Math.max(2, Math.floor(width / 110)));
  const [unit, factor] = [["s", 1], ["ms", 1e-3], ["us", 1e-6], ["ns", 1e-9]]
    .find(([, f]) => view.to >= f) || ["ns", 1e-9];
  const digits = Math.min(9, Math.max(0, -Math.floor(Math.log10(step / factor) + 1e-9)));
  context.font = "11px sans-serif";
  for (const time of times) {
    const x = LEFT + (time - view.from) / (view.to - view.from) * width;
    context.fillStyle = line;
    context.fillRect(Math.round(x), AXIS - 5, 1, bottom - AXIS + 5);
    context.fillStyle = ink;
    context.fillText(`${(time / factor).toFixed(digits)} ${unit}`, x, AXIS / 2 - 2);
  }
}

// Draws the whole view at the size of its frame.
function drawTimeline() {
  const canvas = byId("time-canvas"), { lanes, height } = shownLanes();
  const full = byId("time-frame").clientWidth, width = Math.max(full - LEFT - RIGHT, 100);
  const bottom = AXIS + lanes.length * (height + GAP), ratio = window.devicePixelRatio || 1;
  canvas.style.height = `${bottom}px`;
  canvas.width = Math.round(full * ratio);
  canvas.height = Math.round(bottom * ratio);
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  const style = getComputedStyle(document.body);
  const [ink, faint] = ["--ink", "--line"].map((name) => style.getPropertyValue(name).trim());
  const colours = activityColours();
  context.textBaseline = "middle";
  context.textAlign = "center";
  drawAxis(context, width, bottom, ink, faint);
  lanes.forEach((lane, row) => {
    const y = AXIS + row * (height + GAP), stage = plan.stages[lane.stage];
    context.textAlign = "center";
    drawLane(context, lane, y, height, width, ratio, colours);
    context.font = "11px sans-serif";
    context.fillStyle = stageColour(lane.stage);
    context.fillRect(0, y, 5, height);
    context.fillStyle = ink;
    context.textAlign = "left";
    context.fillText(`${lane.stage}: ranks ${stage.ranks}`, 10, y + height / 2 + 0.5, LEFT - 16);
    context.textAlign = "right";
    context.fillText(plan.timeline.end_s ? formatShare(1 - workShare(lane)) : "-", full - 4, y + height / 2 + 0.5);
  });
  context.textAlign = "right";
  context.fillText("bubble", full - 4, AXIS / 2 - 2);
  context.textAlign = "left";
  context.fillText("stage", 10, AXIS / 2 - 2);
  drawCursor(context, lanes, height, width, ink);
}

// Share of the step in which a lane does not wait.
function workShare(lane) {
  let sum = 0;
  lane.busy.forEach((seconds, what) => { if (what !== BUBBLE) sum += seconds; });
  return sum / plan.timeline.end_s;
}

// A frame around the box that the keys chose, in the first lane shown.
function drawCursor(context, lanes, height, width, ink) {
  const lane = lanes[0];
  if (view.cursor < 0 || view.cursor >= lane.count) return;
  const scale = width / (view.to - view.from);
  const left = Math.max((lane.start[view.cursor] - view.from) * scale, 0);
  const right = Math.min((lane.start[view.cursor + 1] - view.from) * scale, width);
  context.strokeStyle = ink;
  context.lineWidth = 2;
  if (right > left) context.strokeRect(LEFT + left, AXIS + 1, right - left, height - 2);
}

// Shows the times from `from` on, `length` seconds, inside the step; draws in the next frame.
let framePending = false;
function setView(from, length) {
  const end_s = plan.timeline.end_s;
  const kept = Math.min(Math.max(length, end_s / MAX_ZOOM), end_s);
  view.from = Math.min(Math.max(from, 0), end_s - kept);
  view.to = view.from + kept;
  if (framePending) return;
  framePending = true;
  requestAnimationFrame(() => {
    framePending = false;
    drawTimeline();
  });
}

// Zooms by a factor around a share of the visible width.
function zoom(factor, around = 0.5) {
  const length = view.to - view.from, kept = Math.min(length / factor, plan.timeline.end_s);
  setView(view.from + around * (length - kept), kept);
}

// Moves by a share of what is visible.
function pan(share) {
  setView(view.from + share * (view.to - view.from), view.to - view.from);
}

// The lane and time under the pointer; the time is null left and right of the lanes.
function placeOf(event) {
  const box = byId("time-canvas").getBoundingClientRect(), { lanes, height } = shownLanes();
  const width = box.width - LEFT - RIGHT, x = event.clientX - box.left - LEFT;
  const lane = lanes[Math.floor((event.clientY - box.top - AXIS) / (height + GAP))];
  const time = x >= 0 && x <= width ? view.from + x / width * (view.to - view.from) : null;
  return { lane, time, share: Math.min(Math.max(x / width, 0), 1), width };
}

// Steps from box to box of the first lane shown, and says what it is.
function stepBox(by) {
  const lane = shownLanes().lanes[0];
  const next = view.cursor < 0 ? boxAt(lane, view.from) : view.cursor + by;
  view.cursor = Math.min(Math.max(next, 0), lane.count - 1);
  byId("time-readout").textContent = describeBox(lane, view.cursor).replaceAll("\n", ", ");
  const middle = (lane.start[view.cursor] + lane.start[view.cursor + 1]) / 2;
  const length = view.to - view.from;
  setView(middle < view.from || middle > view.to ? middle - length / 2 : view.from, length);
}

const TIMELINE_KEYS = {
  ArrowLeft: () => pan(-0.1),
  ArrowRight: () => pan(0.1),
  "+": () => zoom(1.5),
  "=": () => zoom(1.5),
  "-": () => zoom(1 / 1.5),
  0: () => setView(0, plan.timeline.end_s),
  ",": () => stepBox(-1),
  ".": () => stepBox(1),
};

// Pointer on the canvas: hover says, drag moves, a click on a label chooses the stage.
function listenToPointer(canvas) {
  let grabbed = null;
  canvas.addEventListener("mousedown", (event) => {
    grabbed = { x: event.clientX, from: view.from };
  });
  window.addEventListener("mouseup", () => { grabbed = null; });
  canvas.addEventListener("mousemove", (event) => {
    const { lane, time, width } = placeOf(event);
    if (grabbed) {
      const length = view.to - view.from;
      setView(grabbed.from - (event.clientX - grabbed.x) / width * length, length);
    } else if (lane && time !== null) showTip(event, describeBox(lane, boxAt(lane, time)));
    else hideTip();
  });
  canvas.addEventListener("mouseleave", hideTip);
  canvas.addEventListener("click", (event) => {
    const { lane, time } = placeOf(event);
    if (lane && time === null) toggleStage(lane.stage);
  });
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    zoom(Math.exp(-event.deltaY / 300), placeOf(event).share);
  }, { passive: false });
}

// Sets the view up: legend, keys, pointer, buttons.
function startTimeline() {
  const canvas = byId("time-canvas");
  canvas.setAttribute("aria-label", "Timeline of one step: one lane a stage, time from left to right");
  const used = new Set(LANES.flatMap((lane) => [...lane.busy.keys()].filter((a) => lane.busy[a] > 0)));
  fill(byId("time-legend"), plan.timeline.activities
    .filter((name, i) => used.has(i) || i === BUBBLE)
    .map((name) => legendItem(colour("activity", name), name)));
  listenToPointer(canvas);
  canvas.addEventListener("keydown", (event) => {
    const act = TIMELINE_KEYS[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  });
  byId("zoom-in").addEventListener("click", () => zoom(2));
  byId("zoom-out").addEventListener("click", () => zoom(0.5));
  byId("zoom-fit").addEventListener("click", () => setView(0, plan.timeline.end_s));
  new ResizeObserver(() => setView(view.from, view.to - view.from)).observe(byId("time-frame"));
  watch(() => {
    view.cursor = -1;
    byId("time-readout").textContent = "";
    drawTimeline();
  });
}
