// A table with sorting and pages, so that 10,000 rows cost as much as 50.
import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import { Button, Empty } from "./ui";

export interface Column<Row> {
  name: string;
  /** What is shown. */
  cell: (row: Row) => ComponentChildren;
  /** By what rows are sorted; without it the column cannot sort. */
  by?: (row: Row) => string | number | null;
  right?: boolean;
  /** Long text, which stays readable on a narrow screen. */
  long?: boolean;
}

const PAGE = 50;

export function Table<Row>(props: {
  columns: Column<Row>[];
  rows: Row[];
  keyOf: (row: Row) => string;
  label: string;
  sort?: string;
  descending?: boolean;
  empty?: string;
  rowsOfPage?: number;
}) {
  const size = props.rowsOfPage ?? PAGE;
  const [sort, setSort] = useState({ name: props.sort ?? "", down: props.descending ?? false });
  const [page, setPage] = useState(0);
  const by = props.columns.find((column) => column.name === sort.name)?.by;
  const rows = by ? [...props.rows].sort((a, b) => compare(by(a), by(b)) * (sort.down ? -1 : 1)) : props.rows;
  const last = Math.max(0, Math.ceil(rows.length / size) - 1);
  const at = Math.min(page, last);
  if (!rows.length) return <Empty>{props.empty ?? "Nothing yet."}</Empty>;
  return (
    <>
      <div class="table" tabIndex={0} role="region" aria-label={props.label}>
        <table>
          <thead>
            <tr>
              {props.columns.map((column) => (
                <th
                  key={column.name}
                  scope="col"
                  class={column.right ? "right" : ""}
                  aria-sort={column.name === sort.name ? (sort.down ? "descending" : "ascending") : undefined}
                >
                  {column.by ? (
                    <button
                      type="button"
                      onClick={() => setSort({ name: column.name, down: column.name === sort.name ? !sort.down : !!column.right })}
                    >
                      {column.name}
                      <span aria-hidden="true">{column.name === sort.name ? (sort.down ? " ▾" : " ▴") : ""}</span>
                    </button>
                  ) : (
                    column.name
                  )}
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {rows.slice(at * size, (at + 1) * size).map((row) => (
              <tr key={props.keyOf(row)}>
                {props.columns.map((column) => (
                  <td key={column.name} class={column.right ? "right" : column.long ? "long" : ""}>
                    {column.cell(row)}
                  </td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {last > 0 && (
        <nav class="pages" aria-label={`pages of ${props.label}`}>
          <Button disabled={at === 0} onClick={() => setPage(at - 1)}>Previous</Button>
          <span>
            {at * size + 1} to {Math.min(rows.length, (at + 1) * size)} of {rows.length}
          </span>
          <Button disabled={at === last} onClick={() => setPage(at + 1)}>Next</Button>
        </nav>
      )}
    </>
  );
}

function compare(a: string | number | null, b: string | number | null): number {
  if (a === null || b === null) return a === b ? 0 : a === null ? -1 : 1;
  return typeof a === "string" && typeof b === "string" ? a.localeCompare(b, undefined, { numeric: true }) : a < b ? -1 : a > b ? 1 : 0;
}
