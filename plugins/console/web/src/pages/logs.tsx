export function LogsPage() {
  return <div class="head"><h1>Logs</h1></div>;
}
