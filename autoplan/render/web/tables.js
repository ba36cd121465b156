// Tables that can be filtered and sorted: stages, parameters, conversions, ops.

const PAGE = 200; // rows drawn at once

// A cell's content: text, or chips where the column says so.
function cellContent(column, row) {
  const value = column.value(row);
  if (column.chips) return value ? chips(value) : "";
  return column.form ? column.form(value) : String(value);
}

// The name cell: the folded pattern, and below it the names that the filter means if not all.
function nameCell(row, words) {
  const cell = make("td", { class: "name" }, [row.pattern]);
  if (!words.length || row.names.length < 2) return cell;
  const hits = namesHolding(row, words);
  if (!hits.length || hits.length === row.names.length) return cell;
  const more = hits.length > 3 ? ` and ${hits.length - 3} more` : "";
  cell.append(make("div", { class: "about" }, [hits.slice(0, 3).join(", ") + more]));
  return cell;
}

// Everything a row says, in small letters, for the filter.
function textOf(columns, row) {
  const cells = columns.map((c) => (c.form ? c.form(c.value(row)) : String(c.value(row))));
  return cells.join(" ").toLowerCase();
}

// Rows that the stage, the search box and the table's own filter leave.
function filteredRows(table) {
  const words = wordsOf(selection.query), own = wordsOf(table.input.value);
  return table.rows.filter((row) => {
    if (!areShown(row.stages)) return false;
    if (words.length && !namesHolding(row, words).length) return false;
    if (!own.length) return true;
    row.text ??= textOf(table.columns, row);
    return holds(row.text, own) || namesHolding(row, own).length > 0;
  });
}

// Rows in the order of the chosen column; the plan's own order if none is chosen.
function sortedRows(table, rows) {
  if (table.sort === null) return rows;
  const { value } = table.columns[table.sort], sign = table.down ? -1 : 1;
  const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b
    : String(a).localeCompare(String(b), "en", { numeric: true }));
  return [...rows].sort((a, b) => sign * compare(value(a), value(b)));
}

// Draws the rows of a table, at most `table.limit`.
function drawTable(table) {
  const rows = sortedRows(table, filteredRows(table)), own = wordsOf(table.input.value);
  const words = own.length ? own : wordsOf(selection.query);
  fill(table.body, rows.slice(0, table.limit).map((row) => make("tr", {}, table.columns.map((column) =>
    (column.isName ? nameCell(row, words)
      : make("td", { class: column.kind ?? "" }, [cellContent(column, row)]))))));
  const hidden = rows.length - Math.min(rows.length, table.limit);
  table.count.textContent = `${rows.length} of ${table.rows.length} rows` +
    (hidden ? `, ${hidden} not drawn` : "");
  table.more.hidden = !hidden;
  table.columns.forEach((column, i) => {
    const order = table.sort !== i ? "none" : table.down ? "descending" : "ascending";
    column.head.setAttribute("aria-sort", order);
  });
}

// The head of a column: a button that sorts, first upwards (numbers downwards), then the other way.
function headCell(table, column, i) {
  const button = make("button", { type: "button", onclick: () => {
    table.down = table.sort === i ? !table.down : column.kind === "number";
    table.sort = i;
    drawTable(table);
  } }, [column.title]);
  column.head = make("th", { scope: "col", class: column.kind ?? "" }, [button]);
  return column.head;
}

// Builds a table in its section: filter box, count, head, rows.
function startTable(id, noun, columns, rows) {
  const table = { columns, rows, sort: null, down: false, limit: PAGE };
  table.input = make("input", { type: "search", placeholder: "any column", autocomplete: "off",
    spellcheck: false, oninput: () => { table.limit = PAGE; drawTable(table); } });
  table.input.id = `${id}-filter`;
  table.count = make("span", { class: "hint", role: "status" });
  table.body = make("tbody");
  table.more = make("button", { type: "button", onclick: () => {
    table.limit += 5 * PAGE;
    drawTable(table);
  } }, ["More rows"]);
  const head = make("tr", {}, columns.map((column, i) => headCell(table, column, i)));
  byId(id).append(
    make("div", { class: "tools" }, [make("label", {}, [`Filter ${noun} `, table.input]), table.count]),
    make("div", { class: "scroll tall", tabIndex: 0, role: "region", "aria-label": `Table of ${noun}` },
      [make("table", {}, [make("thead", {}, [head]), table.body])]),
    table.more,
  );
  watch(() => drawTable(table));
}

const nameColumn = { title: "name", isName: true, value: (row) => row.pattern };
const stagesColumn = { title: "stages", value: (row) => row.stages, form: formatStages };
const column = (title, key, more = {}) => ({ title, value: (row) => row[key], ...more });
const seconds = (title, key) => column(title, key, { kind: "number", form: formatSeconds });
const bytes = (title, key) => column(title, key, { kind: "number", form: formatBytes });
const count = (title, key) => column(title, key, { kind: "number" });

// Stages as rows; their names are those of their blocks and parameters.
function stageRows() {
  return plan.stages.map((stage) => {
    const layers = LAYERS.filter((layer) => layer.stage === stage.index);
    const names = layers.flatMap((layer) => [layer.label, ...layer.parameters.map((p) => p.name)]);
    return { ...stage, ...stage.sent_bytes, names, stages: [stage.index], numLayers: layers.length,
      numAgain: layers.filter((layer) => layer.again).length, received: stage.receives.join("; ") };
  });
}

// The four tables of the page.
function startTables() {
  startTable("stages", "stages", [
    count("stage", "index"), column("ranks", "ranks"), count("layers", "numLayers"),
    count("run again", "numAgain"), seconds("forward", "forward_s"), seconds("backward", "backward_s"),
    seconds("conversions", "communication_s"), seconds("recompute", "recompute_s"),
    seconds("send", "send_s"), seconds("reduction", "reduction_s"), seconds("optimizer", "optimizer_s"),
    ...Object.keys(plan.colours.axis).map((axis) => bytes(`sent on ${axis}`, axis)),
    bytes("memory", "total_bytes"),
    column("receives", "received", { kind: "reason long" }),
  ], stageRows());
  startTable("parameters", "parameters", [
    nameColumn, column("shape", "shape"), column("dtype", "dtype"),
    column("stored", "stored", { chips: true }), column("used", "used", { chips: true }),
    count("ZeRO", "zero"), stagesColumn, column("runner-up, and what it costs", "runnerUp", { kind: "reason" }),
  ], PARAMETERS);
  startTable("conversions", "conversions", [
    nameColumn, column("from", "source", { chips: true }), column("to", "target", { chips: true }),
    column("forward", "forward"), column("backward", "backward"), bytes("size", "bytes"),
    seconds("time", "seconds"), count("count", "count"), seconds("all of them", "total"), stagesColumn,
  ], CONVERSIONS);
  startTable("ops", "ops", [
    column("module", "module", { kind: "name" }), column("op", "op", { kind: "mono" }), column("kind", "kind"),
    column("layouts", "flow", { kind: "reason" }), seconds("forward", "forward"), seconds("backward", "backward"),
    seconds("own collectives", "communication"), bytes("saved", "saved"),
    count("count", "count"), column("numbers", "source"), stagesColumn,
  ], OPS);
}
